import type { Fleet, Host } from "./api.ts";
import { count, percent, version } from "./format.ts";
import { Table } from "./part.tsx";

/** What became of requests, as gates count it, in words. */
const OUTCOMES: [string, string][] = [
  ["answered", "Answered"],
  ["partial", "Ended partial"],
  ["unmet", "Version missing (409)"],
  ["too_many", "Too many (429)"],
  ["not_ready", "No engine (503)"],
  ["engine_failed", "Engine failed"],
  ["left", "Caller left"],
];

/** Requests at all gates, as hosts reported them last. Nothing in fleets without gates. */
export function RequestsPart({ fleet }: { fleet: Fleet | null }) {
  const hosts = fleet?.hosts.filter(({ gate, standing }) => gate !== "" && standing !== "lost" && standing !== "stopped") ?? [];
  if (hosts.length === 0) return null;
  const tokens = tokensOf(hosts);
  const all = [...tokens.values()].reduce((sum, each) => sum + each, 0);
  const rows = versions(hosts, tokens).map((each) => {
    const serving = hosts.filter((host) => host.served_version === each);
    const made = each === null ? null : (tokens.get(each) ?? 0);
    const share = percent(made === null || all === 0 ? null : made / all);
    return [version(each), count(serving.length), count(total(serving, "under_way")), count(total(serving, "waiting")), count(made), share];
  });
  return (
    <section id="requests" aria-labelledby="requests-title">
      <h2 id="requests-title">Requests</h2>
      <dl class="strip">
        <Fact name="Gates" value={hosts.length} />
        <Fact name="Closed for updates" value={total(hosts, "closed")} />
        {OUTCOMES.map(([outcome, name]) => (
          <Fact key={outcome} name={name} value={total(hosts, outcome)} />
        ))}
      </dl>
      <Table name="Requests by version" heads={["Version", "Gates", "Under way", "Waiting", "Tokens", "Share"]} rows={rows} texts={0} />
    </section>
  );
}

function Fact({ name, value }: { name: string; value: number }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{count(value)}</dd>
    </div>
  );
}

function total(hosts: readonly Host[], name: string): number {
  return hosts.reduce((sum, { requests }) => sum + (requests[name] ?? 0), 0);
}

function tokensOf(hosts: readonly Host[]): Map<number, number> {
  const found = new Map<number, number>();
  for (const { tokens } of hosts)
    for (const [made, number] of Object.entries(tokens)) found.set(Number(made), (found.get(Number(made)) ?? 0) + number);
  return found;
}

const MOST = 8;

/** Newest first, hosts that serve none last; old ones that only tokens are left of are cut. */
function versions(hosts: readonly Host[], tokens: ReadonlyMap<number, number>): (number | null)[] {
  const served = new Set(hosts.map((host) => host.served_version));
  const known = [...new Set([...served, ...tokens.keys()])].sort((a, b) => (b ?? -1) - (a ?? -1));
  return known.filter((each, at) => at < MOST || served.has(each));
}
