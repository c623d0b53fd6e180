import type { LagSample, Version } from "./api.ts";
import { Chart } from "./chart.tsx";
import { bytes, clock, count, date, percent, seconds, times, version } from "./format.ts";
import type { Part } from "./live.ts";
import { marksOf, type Mark } from "./marks.ts";
import { Section, Table } from "./part.tsx";


export function VersionsPart({ part, lag }: { part: Part<{ versions: Version[] }>; lag: LagSample[] }) {
  return (
    <Section id="versions" title="Versions" part={part}>
      {({ versions }) => (versions.length === 0 ? <p class="none">Nothing was published yet.</p> : <Versions versions={versions} marks={marksOf(versions, lag)} />)}
    </Section>
  );
}

/** What charts of versions share; oldest first. */
function axis(oldestFirst: Version[], marks: Map<number, Mark>) {
  return {
    names: oldestFirst.map((each) => `v${each.version}\n${clock(each.created)}`),
    labels: oldestFirst.map((each) => `v${each.version}, ${date(each.created)}`),
    marks: oldestFirst.map((each) => marks.get(each.version)!),
    group: "versions",
    shape: "bars" as const,
    newestLast: true,
  };
}

/** How long versions take to engines, and how long these answer nothing. */
export function ServedCharts({ versions, lag }: { versions: Version[]; lag: LagSample[] }) {
  if (versions.length === 0) return null;
  const all = [...versions].reverse();
  // hosts report their last updates only
  const oldestFirst = all.slice(Math.max(0, all.findIndex((each) => each.served_seconds != null)));
  const shared = { ...axis(oldestFirst, marksOf(versions, lag)), group: "served", text: seconds, unknown: "no host reports it" };
  return (
    <>
      <Chart {...shared} title="Published to served, half of the hosts" values={oldestFirst.map((each) => each.served_seconds ?? null)} />
      <Chart {...shared} title="Longest pause of engines" values={oldestFirst.map((each) => each.pause_seconds ?? null)} />
    </>
  );
}

function Versions({ versions, marks }: { versions: Version[]; marks: Map<number, Mark> }) {
  const oldestFirst = [...versions].reverse();
  const shared = axis(oldestFirst, marks);
  return (
    <>
      <div class="charts">
        <Chart {...shared} title="Delta" values={oldestFirst.map((each) => each.bytes)} text={bytes} />
        <Chart {...shared} title="Time to publish" values={oldestFirst.map((each) => each.publish_seconds)} text={seconds} unknown="published before this publisher started" />
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

function VersionTable({ versions, marks }: { versions: Version[]; marks: Map<number, Mark> }) {
  const rows = versions.map((each) => [
    ...[version(each.version), count(each.step), date(each.created), bytes(each.bytes), count(each.changed), percent(each.density)],
    ...[times(each.ratio), ...[each.publish_seconds, each.served_seconds, each.pause_seconds].map(known), notes(each, marks.get(each.version)!)],
  ]);
  return <Table name="Versions as a table" heads={["Version", "Step", "Created", "Delta", "Changed", "Density", "Ratio", "Publish", "Served after", "Pause", "Notes"]} rows={rows} />;
}

function known(value: number | null | undefined): string {
  return value == null ? "not known" : seconds(value);
}

function notes({ tags, anchor, kept, skips }: Version, mark: Mark): string {
  const parts = tags.map((tag) => `tag ${tag}`);
  if (mark.text !== "") parts.push(mark.text);
  if (kept) parts.push("kept");
  if (anchor) parts.push("anchor");
  if (skips.length > 0) parts.push(`delta from ${skips.join(", ")}`);
  return parts.length === 0 ? "–" : parts.join("; ");
}
