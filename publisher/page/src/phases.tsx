import { PAUSED, PHASES, type Phase, type Update } from "./api.ts";
import { seconds } from "./format.ts";

/** Hosts say what they like: a negative time is none. */
function time(update: Update, phase: Phase | "total" | "pause_total"): number {
  return Math.max(0, update.seconds[phase] ?? 0);
}

export function total(update: Update): number {
  return time(update, "total") || sum(update, PHASES);
}

export function paused(update: Update): number {
  return update.seconds.pause_total === undefined ? sum(update, [...PAUSED]) : time(update, "pause_total");
}

function sum(update: Update, phases: readonly Phase[]): number {
  return phases.reduce((all, phase) => all + time(update, phase), 0);
}

/** Width of the longest bar. Phases that overlap make a bar longer than its total. */
export function longest(updates: Update[]): number {
  return Math.max(...updates.map((update) => sum(update, PHASES)), 1e-9);
}

/** One bar per update, all to the same scale: `longest` seconds are the whole width. */
export function PhaseBar({ update, longest }: { update: Update; longest: number }) {
  const parts = PHASES.filter((phase) => time(update, phase) > 0);
  const text = parts.map((phase) => `${word(phase)} ${seconds(time(update, phase))}`).join(", ");
  return (
    <div class="phases" role="img" aria-label={text === "" ? "no time measured" : text}>
      {parts.map((phase) => (
        <span
          key={phase}
          class={`phase-${phase}`}
          style={{ width: `${(100 * time(update, phase)) / longest}%` }}
          title={`${word(phase)} ${seconds(time(update, phase))}`}
        />
      ))}
    </div>
  );
}

export function PhaseLegend({ updates }: { updates: Update[] }) {
  const present = PHASES.filter((phase) => updates.some((update) => time(update, phase) > 0));
  return (
    <ul class="legend" aria-label="Phases of an update">
      {present.map((phase) => (
        <li key={phase}>
          <span class={`swatch phase-${phase}`} aria-hidden="true" />
          {word(phase)}
        </li>
      ))}
    </ul>
  );
}

function word(phase: Phase): string {
  return phase.replace("_", " ");
}
