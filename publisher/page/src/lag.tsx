import type { LagHistory, LagSample, Version } from "./api.ts";
import { Chart, type Layer } from "./chart.tsx";
import { clock, count } from "./format.ts";
import type { Part } from "./live.ts";
import { mark, marksOf, type Mark } from "./marks.ts";
import { Section, Table } from "./part.tsx";
import { ServedCharts } from "./versions.tsx";

/** From below: the name, and what of a sample counts. */
const LAYERS: [name: string, labels: string[]][] = [
  ["up to date", ["0"]],
  ["1 behind", ["1"]],
  ["2–3 behind", ["2-3"]],
  ["4 or more behind", ["4-15", "16-63", "64+"]],
  ["no version", ["unknown"]],
  ["lost", []],
];
const SAMPLE_SECONDS = 30;
const MOST_SLOTS = 120;

export function LagPart({ part, versions }: { part: Part<LagHistory>; versions: Version[] }) {
  return (
    <Section id="lag" title="Lag and delay" part={part}>
      {({ samples }) =>
        samples.some((sample) => hostsOf(sample) > 0) ? <Lags samples={samples} versions={versions} /> : <p class="none">No host has reported yet.</p>
      }
    </Section>
  );
}

/** One point of the time axis; without a sample the publisher did not run, or could not read the channel. */
interface Slot {
  at: number;
  sample: LagSample | undefined;
  mark: Mark;
}

function Lags({ samples, versions }: { samples: LagSample[]; versions: Version[] }) {
  const slots = slotsOf(samples, versions);
  const present = LAYERS.map((_, layer) => samples.some((sample) => hostsAt(sample, layer)! > 0));
  const layers = LAYERS.map(
    ([name], layer): Layer => ({
      name,
      colour: `--lag-${layer}`,
      values: slots.map(({ sample }) => hostsAt(sample, layer)),
    }),
  ).filter((_, layer) => present[layer]);
  return (
    <>
      <div class="charts">
        <Chart
          title="Hosts by versions behind"
          names={slots.map(({ at }) => clock(at).slice(0, 5))}
          labels={slots.map(({ at }) => clock(at))}
          marks={slots.map(({ mark }) => mark)}
          values={slots.map(({ sample }) => (sample === undefined ? null : hostsOf(sample)))}
          layers={layers}
          text={hosts}
          shape="bars"
          newestLast
        />
        <ServedCharts versions={versions} lag={samples} />
      </div>
      <details>
        <summary>As a table</summary>
        <LagTable slots={slots} layers={layers} />
      </details>
    </>
  );
}

/** Newest first, without times at which nothing had changed. */
function LagTable({ slots, layers }: { slots: Slot[]; layers: Layer[] }) {
  const rows = slots.map(({ at, mark }, slot) => [clock(at), ...layers.map(({ values }) => count(values[slot])), mark.text || "–"]);
  const figures = ([, ...others]: string[]) => others.join();
  const changed = rows.filter((row, at) => at === 0 || figures(row) !== figures(rows[at - 1]!));
  return <Table name="Hosts by versions behind as a table" heads={["From", ...layers.map(({ name }) => name), "Publisher"]} rows={changed.reverse()} />;
}

function slotsOf(samples: LagSample[], versions: Version[]): Slot[] {
  const period = (at: number) => Math.floor(at / SAMPLE_SECONDS);
  const known = new Map(samples.map((sample) => [period(sample.at), sample]));
  const marks = marksOf(versions, []);
  const back = new Map<number, string>();
  for (const { version, created } of versions) {
    const { text } = marks.get(version)!;
    if (text !== "") back.set(period(created ?? 0), `version ${version}: ${text}`);
  }
  // a clock may have been set
  const last = Math.max(...known.keys());
  const first = Math.max(Math.min(...known.keys()), last - MOST_SLOTS + 1);
  return Array.from({ length: last - first + 1 }, (_, slot) => {
    const sample = known.get(first + slot);
    const held = sample === undefined || sample.held === "" ? "" : `held: ${sample.held}`;
    return { at: sample?.at ?? (first + slot) * SAMPLE_SECONDS, sample, mark: mark(back.get(first + slot) ?? "", held) };
  });
}

function hostsAt(sample: LagSample | undefined, layer: number): number | null {
  if (sample === undefined) return null;
  const [name, labels] = LAYERS[layer]!;
  return name === "lost" ? sample.lost : labels.reduce((sum, label) => sum + (sample.behind[label] ?? 0), 0);
}

function hostsOf(sample: LagSample): number {
  return LAYERS.reduce((sum, _, layer) => sum + hostsAt(sample, layer)!, 0);
}

/** Between two hosts there is nothing to name. */
function hosts(value: number): string {
  return Number.isInteger(value) ? count(value) : "";
}
