import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";

export interface Series {
  /** Shown above the chart and read out. */
  title: string;
  /** One per point: what stands below the axis. */
  names: string[];
  /** One per point: what is read out for it; `names` where it is missing. */
  labels?: string[];
  /** One per point; null where nothing was measured. */
  values: (number | null)[];
  text: (value: number) => string;
  shape: "bars" | "line";
  /** Whether the last point is the one to read when none is under the cursor. */
  newestLast?: boolean;
  /** Charts of one group show the same point under the cursor. */
  group?: string;
}

const HEIGHT = 132;

/** A chart of one series over evenly spaced points. The figures must also stand in a table: a canvas says nothing
 * to a screen reader. */
export function Chart(series: Series) {
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
  }, [theme, series.shape, series.group]);

  const points = `${series.names.join()}|${series.values.join()}`;
  useEffect(() => chart.current?.setData(data(now.current)), [points]);

  return (
    <figure class="chart">
      <figcaption>
        <span>{series.title}</span> <Reading series={series} at={under} />
      </figcaption>
      <div ref={place} role="img" aria-label={`${series.title}: ${summary(series)}`} />
    </figure>
  );
}

function Reading({ series, at }: { series: Series; at: number | null }) {
  const point = at ?? (series.newestLast === true ? series.values.length - 1 : -1);
  const value = series.values[point];
  if (value == null) return null;
  return (
    <span class="reading">
      {at !== null && <small>{(series.labels ?? series.names)[point]}</small>} {series.text(value)}
    </span>
  );
}

function summary({ values, text }: Series): string {
  const known = values.filter((value) => value !== null);
  if (known.length === 0) return "nothing measured";
  return `${known.length} points, least ${text(Math.min(...known))}, most ${text(Math.max(...known))}`;
}

function data({ values }: Series): uPlot.AlignedData {
  return [values.map((_, at) => at), values];
}

function options(
  now: { current: Series },
  place: HTMLElement,
  setUnder: (point: number | null) => void,
): uPlot.Options {
  const { shape, group } = now.current;
  const colour = (name: string) => getComputedStyle(place).getPropertyValue(name).trim();
  const bars = shape === "bars";
  const [ink, line, mark] = [colour("--quiet"), colour("--line"), colour("--mark")];
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
    hooks: { setCursor: [(chart) => setUnder(chart.cursor.idx ?? null)] },
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
      {
        stroke: mark,
        ...(bars ? { fill: mark, width: 0, paths: uPlot.paths.bars!({ size: [0.72, 26], radius: 0.12 }) } : { width: 1.6 }),
        points: { show: !bars && now.current.values.length < 40, size: 4, fill: mark, stroke: mark },
        spanGaps: true,
      },
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
