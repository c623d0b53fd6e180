import type { Version } from "./api.ts";
import { Chart } from "./chart.tsx";
import { bytes, count, date, percent, seconds, times, version } from "./format.ts";
import type { Part } from "./live.ts";
import { Section, Wide } from "./part.tsx";

export function VersionsPart({ part }: { part: Part<{ versions: Version[] }> }) {
  return (
    <Section id="versions" title="Versions" part={part}>
      {({ versions }) => (versions.length === 0 ? <p class="none">Nothing was published yet.</p> : <Versions versions={versions} />)}
    </Section>
  );
}

function Versions({ versions }: { versions: Version[] }) {
  const oldestFirst = [...versions].reverse();
  const shared = { names: oldestFirst.map((each) => `v${each.version}`), group: "versions", shape: "bars" as const, newestLast: true };
  return (
    <>
      <div class="charts">
        <Chart {...shared} title="Delta" values={oldestFirst.map((each) => each.bytes)} text={bytes} />
        <Chart {...shared} title="Changed elements" values={oldestFirst.map((each) => each.density)} text={percent} />
        <Chart {...shared} title="Full weights ÷ delta" values={oldestFirst.map((each) => each.ratio)} text={times} />
        <Chart {...shared} title="Time to publish" values={oldestFirst.map((each) => each.publish_seconds)} text={seconds} />
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

function beside({ tags, anchor, kept, skips, step }: Version, before: Version | undefined): string {
  const parts = tags.map((tag) => `tag ${tag}`);
  const stepBefore = before?.step ?? null;
  if (step !== null && stepBefore !== null && step < stepBefore) parts.push(`resumed from step ${stepBefore}`);
  if (kept) parts.push("kept");
  if (anchor) parts.push("anchor");
  if (skips.length > 0) parts.push(`delta from ${skips.join(", ")}`);
  return parts.length === 0 ? "–" : parts.join("; ");
}
