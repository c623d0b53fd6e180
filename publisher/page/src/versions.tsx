import type { Host, Update, Version } from "./api.ts";
import { Chart } from "./chart.tsx";
import { bytes, clock, count, date, percent, seconds, times, version } from "./format.ts";
import type { Part } from "./live.ts";
import { Section, Wide } from "./part.tsx";
import { paused, total } from "./phases.tsx";

export function VersionsPart({ part, hosts }: { part: Part<{ versions: Version[] }>; hosts: Host[] }) {
  return (
    <Section id="versions" title="Versions" part={part}>
      {({ versions }) => (versions.length === 0 ? <p class="none">Nothing was published yet.</p> : <Versions versions={versions} hosts={hosts} />)}
    </Section>
  );
}

function Versions({ versions, hosts }: { versions: Version[]; hosts: Host[] }) {
  const oldestFirst = [...versions].reverse();
  const back = oldestFirst.map((each, at) => wentBack(each, oldestFirst[at - 1]));
  const shared = {
    names: oldestFirst.map((each, at) => `v${each.version}${back[at] && " ↩"}\n${clock(each.created)}`),
    labels: oldestFirst.map((each, at) => `v${each.version}, ${date(each.created)}${back[at] && `, ${back[at]}`}`),
    group: "versions",
    shape: "bars" as const,
    newestLast: true,
  };
  const updates = updatesOf(hosts);
  const of = (each: Version) => updates.get(each.version) ?? [];
  return (
    <>
      <div class="charts">
        <Chart {...shared} title="Delta" values={oldestFirst.map((each) => each.bytes)} text={bytes} />
        <Chart {...shared} title="Time to publish" values={oldestFirst.map((each) => each.publish_seconds)} text={seconds} />
        {updates.size > 0 && (
          <>
            <Chart {...shared} title="Published to served, half of the hosts" values={oldestFirst.map((each) => delay(each, of(each)))} text={seconds} />
            <Chart {...shared} title="Longest pause of engines" values={oldestFirst.map((each) => longestPause(of(each)))} text={seconds} />
          </>
        )}
      </div>
      <details>
        <summary>
          {versions.length < versions[0]!.version && "Newest "}
          {count(versions.length)} {versions.length === 1 ? "version" : "versions"} as a table
        </summary>
        <Wide name="Versions as a table">
          <VersionTable versions={versions} />
        </Wide>
      </details>
    </>
  );
}

/** An update of a host, with the time at which it ended by the publisher's clock. */
interface Ended {
  update: Update;
  at: number;
}

/** By version. Empty in large fleets, whose hosts come without updates. */
function updatesOf(hosts: Host[]): Map<number, Ended[]> {
  const found = new Map<number, Ended[]>();
  for (const host of hosts) {
    for (const update of host.updates) {
      if (update.outcome !== "done" || update.kind === "seed") continue;
      const at = update.began + total(update) - (host.clock_offset_seconds ?? 0);
      found.set(update.version, [...(found.get(update.version) ?? []), { update, at }]);
    }
  }
  return found;
}

function delay({ created }: Version, ended: Ended[]): number | null {
  const seconds = ended.map(({ at }) => Math.max(0, at - (created ?? at))).sort((a, b) => a - b);
  return created === null ? null : (seconds[(seconds.length - 1) >> 1] ?? null);
}

function longestPause(ended: Ended[]): number | null {
  return ended.length === 0 ? null : Math.max(...ended.map(({ update }) => paused(update)));
}

/** To what a rollback, or a trainer that resumed from an older step, went back; or empty. */
function wentBack({ step, same_as: same }: Version, before: Version | undefined): string {
  if (same != null) return `weights of version ${same}`;
  const stepBefore = before?.step ?? null;
  return step !== null && stepBefore !== null && step < stepBefore ? `back from step ${stepBefore}` : "";
}

function VersionTable({ versions }: { versions: Version[] }) {
  return (
    <table class="figures-table">
      <thead>
        <tr>
          {["Version", "Step", "Created", "Delta", "Changed", "Density", "Ratio", "Publish"].map((name) => (
            <th key={name} scope="col" class="number">
              {name}
            </th>
          ))}
          <th scope="col">Beside it</th>
        </tr>
      </thead>
      <tbody>
        {versions.map((each, at) => (
          <tr key={each.version}>
            <th scope="row" class="number">
              {version(each.version)}
            </th>
            <td class="number">{count(each.step)}</td>
            <td class="number">{date(each.created)}</td>
            <td class="number">{bytes(each.bytes)}</td>
            <td class="number">{count(each.changed)}</td>
            <td class="number">{percent(each.density)}</td>
            <td class="number">{times(each.ratio)}</td>
            <td class="number">{seconds(each.publish_seconds)}</td>
            <td>{beside(each, versions[at + 1])}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function beside(each: Version, before: Version | undefined): string {
  const { tags, anchor, kept, skips } = each;
  const parts = tags.map((tag) => `tag ${tag}`);
  const back = wentBack(each, before);
  if (back !== "") parts.push(back);
  if (kept) parts.push("kept");
  if (anchor) parts.push("anchor");
  if (skips.length > 0) parts.push(`delta from ${skips.join(", ")}`);
  return parts.length === 0 ? "–" : parts.join("; ");
}
