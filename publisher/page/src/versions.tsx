import type { Host, LagSample, Update, Version } from "./api.ts";
import { Chart } from "./chart.tsx";
import { bytes, clock, count, date, percent, seconds, times, version } from "./format.ts";
import type { Part } from "./live.ts";
import { marksOf, type Mark } from "./marks.ts";
import { Section, Table } from "./part.tsx";
import { paused, total } from "./phases.tsx";

export function VersionsPart({ part, hosts, lag }: { part: Part<{ versions: Version[] }>; hosts: Host[]; lag: LagSample[] }) {
  return (
    <Section id="versions" title="Versions" part={part}>
      {({ versions }) => (versions.length === 0 ? <p class="none">Nothing was published yet.</p> : <Versions versions={versions} hosts={hosts} marks={marksOf(versions, lag)} />)}
    </Section>
  );
}

function Versions({ versions, hosts, marks }: { versions: Version[]; hosts: Host[]; marks: Map<number, Mark> }) {
  const oldestFirst = [...versions].reverse();
  const shared = {
    names: oldestFirst.map((each) => `v${each.version}\n${clock(each.created)}`),
    labels: oldestFirst.map((each) => `v${each.version}, ${date(each.created)}`),
    marks: oldestFirst.map((each) => marks.get(each.version)!),
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
        <VersionTable versions={versions} marks={marks} />
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

function VersionTable({ versions, marks }: { versions: Version[]; marks: Map<number, Mark> }) {
  const rows = versions.map((each) => [
    ...[version(each.version), count(each.step), date(each.created), bytes(each.bytes), count(each.changed), percent(each.density)],
    ...[times(each.ratio), seconds(each.publish_seconds), notes(each, marks.get(each.version)!)],
  ]);
  return <Table name="Versions as a table" heads={["Version", "Step", "Created", "Delta", "Changed", "Density", "Ratio", "Publish", "Notes"]} rows={rows} />;
}

function notes({ tags, anchor, kept, skips }: Version, mark: Mark): string {
  const parts = tags.map((tag) => `tag ${tag}`);
  if (mark.text !== "") parts.push(mark.text);
  if (kept) parts.push("kept");
  if (anchor) parts.push("anchor");
  if (skips.length > 0) parts.push(`delta from ${skips.join(", ")}`);
  return parts.length === 0 ? "–" : parts.join("; ");
}
