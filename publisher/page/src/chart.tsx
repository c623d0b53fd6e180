import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import { sentence } from "./format.ts";
import type { Mark } from "./marks.ts";

/** A part of each bar. */
export interface Layer {
  name: string;
  /** A variable of the style sheet. */
  colour: string;
  values: (number | null)[];
}

export interface Series {
  /** Shown above the chart and read out. */
  title: string;
  /** One per point: what stands below the axis. */
  names: string[];
  /** One per point: what is read out for it; `names` where it is missing. */
  labels?: string[];
  /** One per point: what happened there. */
  marks?: Mark[];
  /** One per point; null where nothing was measured. Of layers, their sum. */
  values: (number | null)[];
  /** From below; none: the bar has one colour. */
  layers?: Layer[];
  text: (value: number) => string;
  shape: "bars" | "line";
  /** Whether the last point is the one to read when none is under the cursor. */
  newestLast?: boolean;
  /** Why values are missing; said below the chart where some are. */
  unknown?: string;
  /** Charts of one group show the same point under the cursor. */
  group?: string;
}

const HEIGHT = 132;
/** Of the band of a mark, where a bar is not a stretch of time. */
const WIDEST = 34;

/** A chart of one series over evenly spaced points. The figures must also stand in a table: a canvas says nothing
 * to a screen reader. */
export function Chart(series: Series) {
  const unknown = series.values.filter((value) => value === null).length;
  const missing = series.unknown !== undefined && unknown > 0 && `${unknown === series.values.length ? "" : `${unknown} of ${series.values.length} `}not known: ${series.unknown}`;
  if (missing !== false && unknown === series.values.length)
    return (
      <figure class="chart">
        <figcaption>{series.title}</figcaption>
        <p class="missing">{sentence(missing)}</p>
      </figure>
    );
  return <Drawn {...series} missing={missing} />;
}

function Drawn({ missing, ...series }: Series & { missing: string | false }) {
  const place = useRef<HTMLDivElement>(null);
  const chart = useRef<uPlot | null>(null);
  const now = useRef(series);
  now.current = series;
  const [under, setUnder] = useState<number | null>(null);
  const theme = useTheme();

  useEffect(() => {
    const made = new uPlot(options(now, place.current!, setUnder), data(now.current), place.current!);
    chart.current = made;
    const watch = new ResizeObserver(([entry]) => made.setSize({ width: Math.floor(entry!.contentRect.width), height: HEIGHT }));
    watch.observe(place.current!);
    return () => (watch.disconnect(), made.destroy());
  }, [theme, series.shape, series.group, series.layers?.map(({ name }) => name).join()]);

  const points = [series.names, series.values, ...(series.layers ?? []).map(({ values }) => values), series.marks?.map(({ text }) => text)].join("|");
  useEffect(() => chart.current?.setData(data(now.current)), [points]);

  return (
    <figure class="chart">
      <figcaption>
        <span>{series.title}</span> <Reading series={series} at={under} />
      </figcaption>
      <div ref={place} role="img" tabIndex={0} aria-label={`${series.title}: ${summary(series)}`} onKeyDown={(event) => move(chart.current!, event)} onBlur={() => point(chart.current!, null)} />
      {missing !== false && <p class="missing">{missing}</p>}
      {series.layers !== undefined && (
        <ul class="legend">
          {series.layers.map(({ name, colour }) => (
            <li key={name}>
              <span class="swatch" style={{ background: `var(${colour})` }} aria-hidden="true" />
              {name}
            </li>
          ))}
        </ul>
      )}
    </figure>
  );
}

function Reading({ series, at }: { series: Series; at: number | null }) {
  const point = at ?? (series.newestLast === true ? series.values.length - 1 : -1);
  const happened = at === null ? "" : (series.marks?.[point]?.text ?? "");
  const value = valueAt(series, point);
  if (value === "" && happened === "") return null;
  return (
    <span class="reading" data-at={at}>
      {at !== null && (
        <small>
          {(series.labels ?? series.names)[point]}
          {happened !== "" && `, ${happened}`}
        </small>
      )}{" "}
      {value}
    </span>
  );
}

function valueAt({ values, layers, text, unknown }: Series, point: number): string {
  const value = values[point];
  if (value == null) return value === null && unknown !== undefined ? "not known" : "";
  if (layers === undefined) return text(value);
  const parts = layers.filter(({ values }) => (values[point] ?? 0) > 0);
  return parts.map(({ name, values }) => `${name}: ${text(values[point]!)}`).join(", ");
}

function summary(series: Series): string {
  const known = series.values.filter((value) => value !== null);
  if (known.length === 0) return "nothing measured";
  if (series.layers !== undefined) return `last ${valueAt(series, series.values.length - 1)}`;
  return `${known.length} points, least ${series.text(Math.min(...known))}, most ${series.text(Math.max(...known))}`;
}

/** Layers are bars from the ground, the longest behind. */
function data({ values, layers = [] }: Series): uPlot.AlignedData {
  const points = values.map((_, at) => at);
  if (layers.length === 0) return [points, values];
  const up = (to: number) => points.map((at) => (values[at] === null ? null : layers.slice(0, to).reduce((sum, { values }) => sum + (values[at] ?? 0), 0)));
  return [points, ...layers.map((_, layer) => up(layers.length - layer))];
}

/** By arrow keys, as the mouse does. */
function move(chart: uPlot, event: KeyboardEvent): void {
  const last = chart.data[0].length - 1;
  const here = chart.cursor.idx ?? last + 1;
  const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last, Escape: null }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  point(chart, to === null ? null : Math.max(0, Math.min(last, to)));
}

function point(chart: uPlot, at: number | null): void {
  chart.setCursor(at === null ? { left: -10, top: -10 } : { left: chart.valToPos(at, "x"), top: 0 });
}

/** Bands over the bars, with a sign where each begins. */
function drawMarks(chart: uPlot, marks: Mark[], widest: number, colour: string): void {
  const { ctx, bbox } = chart;
  const width = Math.min(chart.valToPos(1, "x", true) - chart.valToPos(0, "x", true), widest * devicePixelRatio);
  ctx.save();
  ctx.fillStyle = colour;
  ctx.textAlign = "center";
  ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
  marks.forEach(({ sign, text }, at) => {
    if (text === "") return;
    const middle = chart.valToPos(at, "x", true);
    ctx.globalAlpha = 0.3;
    ctx.fillRect(middle - width / 2, bbox.top, width, bbox.height);
    ctx.globalAlpha = 1;
    if (marks[at - 1]?.text !== text) ctx.fillText(sign, middle, bbox.top - 5 * devicePixelRatio);
  });
  ctx.restore();
}

function options(
  now: { current: Series },
  place: HTMLElement,
  setUnder: (point: number | null) => void,
): uPlot.Options {
  const { shape, group } = now.current;
  const colour = (name: string) => getComputedStyle(place).getPropertyValue(name).trim();
  const bars = shape === "bars";
  const [ink, line, mark, happened] = [colour("--quiet"), colour("--line"), colour("--mark"), colour("--behind")];
  const layers = [...(now.current.layers ?? [])].reverse();
  const paths = uPlot.paths.bars!(layers.length > 0 ? { size: [0.94] } : { size: [0.72, 26], radius: 0.12 });
  const axis = { stroke: ink, font: "11px system-ui, sans-serif", ticks: { show: false }, border: { show: false } };
  return {
    width: Math.max(place.clientWidth, 50),
    height: HEIGHT,
    legend: { show: false },
    cursor: {
      y: false,
      drag: { setScale: false, x: false, y: false },
      points: { show: !bars },
      ...(group === undefined ? {} : { sync: { key: group } }),
    },
    hooks: {
      setCursor: [(chart) => setUnder(chart.cursor.idx ?? null)],
      draw: [(chart) => drawMarks(chart, now.current.marks ?? [], layers.length > 0 ? Infinity : WIDEST, happened)],
    },
    scales: {
      x: { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] },
      y: { range: (_, __, high) => [0, high > 0 ? high * 1.12 : 1] },
    },
    axes: [
      {
        ...axis,
        size: now.current.names.some((name) => name.includes("\n")) ? 36 : 22,
        grid: { show: false },
        space: 56,
        incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000],
        values: (_, points) => points.map((point) => now.current.names[point] ?? ""),
      },
      {
        ...axis,
        size: 62,
        grid: { stroke: line, width: 1 },
        space: 26,
        values: (_, values) => values.map((value) => now.current.text(value)),
      },
    ],
    series: [
      {},
      ...(layers.length > 0
        ? layers.map(({ colour: name }) => ({ fill: colour(name), width: 0, paths, points: { show: false } }))
        : [
            {
              stroke: mark,
              ...(bars ? { fill: mark, width: 0, paths } : { width: 1.6 }),
              points: { show: !bars && now.current.values.length < 40, size: 4, fill: mark, stroke: mark },
              spanGaps: true,
            },
          ]),
    ],
  };
}

/** New whenever the colours are: they are drawn, not styled. */
function useTheme(): boolean {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const [dark, setDark] = useState(query.matches);
  useEffect(() => {
    const follow = (event: MediaQueryListEvent) => setDark(event.matches);
    query.addEventListener("change", follow);
    return () => query.removeEventListener("change", follow);
  }, []);
  return dark;
}
