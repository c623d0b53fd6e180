import { useContext, useState } from "preact/hooks";
import { forget, type Adapter, type Engine, type Host, type Update } from "./api.ts";
import { age, bytes, clock, count, seconds, version } from "./format.ts";
import { Token, useWhole } from "./live.ts";
import { Wide } from "./part.tsx";
import { longest, paused, PhaseBar, PhaseLegend, total } from "./phases.tsx";

export function HostDetail({ host: known, fleetHasUpdates }: { host: Host; fleetHasUpdates: boolean }) {
  const host = useWhole(known, fleetHasUpdates);
  return (
    <div class="inside">
      <dl class="facts">
        {facts(host).map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {(host.standing === "stopped" || host.standing === "lost") && <Forget host={host} />}
      <Wide name={`Engines of ${host.host}`}>
        <Engines engines={host.engines} now={host.presence === "live" && host.standing !== "stopped"} />
      </Wide>
      <Wide name={`Last updates of ${host.host}`}>
        <Updates updates={host.updates} />
      </Wide>
    </div>
  );
}

/** For hosts that will not return; the row goes with the next look of the publisher. */
function Forget({ host }: { host: Host }) {
  const token = useContext(Token);
  const [said, setSaid] = useState("");
  const ask = () => {
    setSaid("Forgetting…");
    forget(host.key, token).catch((error: Error) => setSaid(error.message));
  };
  return (
    <p class="forget">
      <button type="button" disabled={said === "Forgetting…"} onClick={ask}>
        Forget {host.host}
      </button>{" "}
      <span role="status">{said === "" ? "Deletes its report from the channel, if it will not return." : said}</span>
    </p>
  );
}

function facts(host: Host): [string, string][] {
  return [
    ["Local checkpoint", host.local],
    ["Heard", host.heard_seconds_ago === null ? "unknown" : `${age(host.heard_seconds_ago)} ago`],
    ["Follows", host.target_version === null ? host.target : `${host.target} (${host.target_version})`],
    ["Run", host.run_id],
    ["Read from the channel", read(host.bytes)],
    ["Retries", count(host.retries)],
    ...(host.gate === "" ? [] : [["Gate", gate(host)] satisfies [string, string]]),
    ...host.adapters.map((one): [string, string] => [component(one.name), adapter(one)]),
    ["Clock", offset(host.clock_offset_seconds)],
    ["Software", host.software],
  ];
}

function gate({ gate, requests }: Host): string {
  const now = requests.closed === 1 ? "closed" : `${count(requests.under_way)} under way`;
  return `${gate}: ${now}, ${count(requests.waiting)} waiting, ${count(requests.answered)} answered`;
}

function component(name: string): string {
  return name === "draft" ? "Draft model" : `Adapter ${name.replace("adapter/", "")}`;
}

function adapter({ version, target, main_version, state, error }: Adapter): string {
  const loaded = version === null ? "none loaded" : `version ${version} of ${target ?? "?"}, trained on ${main_version ?? "?"}`;
  return `${loaded}, ${state}${error === "" ? "" : `: ${error}`}`;
}

const CAUSES: [string, string][] = [
  ["step", "steps"],
  ["skip", "deltas from older versions"],
  ["anchor", "anchors"],
  ["repair", "repairs"],
];

function read(causes: Record<string, number>): string {
  const parts = CAUSES.filter(([cause]) => (causes[cause] ?? 0) > 0);
  return parts.length === 0 ? "nothing yet" : parts.map(([cause, word]) => `${bytes(causes[cause])} ${word}`).join(", ");
}

/** What most updates are goes without saying. */
function outcome({ kind, outcome }: Update): string {
  if (kind === "undo") return "rolled back";
  const said = outcome === "refused" ? "not taken by any engine" : outcome;
  return kind === undefined || kind === "patch" ? said : `${kind} ${said}`;
}

function offset(value: number | null): string {
  if (value === null) return "–";
  return `${seconds(Math.abs(value))} ${value < 0 ? "behind" : "ahead"}`;
}

function Engines({ engines, now }: { engines: Engine[]; now: boolean }) {
  if (engines.length === 0) return <p class="none">This host has no engines.</p>;
  return (
    <table>
      <caption>{now ? "Engines" : "Engines, as last reported"}</caption>
      <thead>
        <tr>
          <th scope="col">Engine</th>
          <th scope="col">Kind</th>
          <th scope="col">State</th>
          <th scope="col" class="number">
            Version
          </th>
          <th scope="col">Confirmed by</th>
        </tr>
      </thead>
      <tbody>
        {engines.map((engine) => (
          <tr key={engine.name}>
            <th scope="row">{engine.name}</th>
            <td>{engine.kind}</td>
            <td>{engine.state}</td>
            <td class="number">{version(engine.version)}</td>
            <td>{engine.confirmed_by || "–"}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Updates({ updates }: { updates: Update[] }) {
  if (updates.length === 0) return <p class="none">No update since this host's daemon started.</p>;
  const whole = longest(updates);
  return (
    <>
      <table class="updates">
        <caption>
          Last updates <PhaseLegend updates={updates} />
        </caption>
        <thead>
          <tr>
            <th scope="col" class="number">
              Version
            </th>
            <th scope="col">Began</th>
            <th scope="col" class="time">
              Phases
            </th>
            <th scope="col" class="number">
              Total
            </th>
            <th scope="col" class="number">
              Paused
            </th>
            <th scope="col" class="number">
              Read
            </th>
            <th scope="col">Outcome</th>
          </tr>
        </thead>
        <tbody>
          {updates.map((update) => (
            <tr key={`${update.version} ${update.began}`}>
              <th scope="row" class="number">
                {version(update.version)}
              </th>
              <td>{clock(update.began)}</td>
              <td class="time">
                <PhaseBar update={update} longest={whole} />
              </td>
              <td class="number">{seconds(total(update))}</td>
              <td class="number">{seconds(paused(update))}</td>
              <td class="number">{bytes(update.bytes)}</td>
              <td>{outcome(update)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}
