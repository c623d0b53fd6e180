import { PAUSED, PHASES, type Phase, type Update } from "./api.ts";
import { seconds } from "./format.ts";

const WORDS: Record<Phase, string> = {
  plan: "plan",
  fetch: "fetch",
  stage: "stage",
  patch: "patch",
  pause: "pause",
  reload: "reload",
  read_back: "read back",
  resume: "resume",
};

export function total(update: Update): number {
  return PHASES.reduce((sum, phase) => sum + (update.seconds[phase] ?? 0), 0);
}

export function paused(update: Update): number {
  return PHASES.reduce((sum, phase) => sum + (PAUSED.has(phase) ? (update.seconds[phase] ?? 0) : 0), 0);
}

/** One bar per update, all to the same scale: `longest` seconds are the whole width. */
export function PhaseBar({ update, longest }: { update: Update; longest: number }) {
  const parts = PHASES.filter((phase) => (update.seconds[phase] ?? 0) > 0);
  const text = parts.map((phase) => `${WORDS[phase]} ${seconds(update.seconds[phase])}`).join(", ");
  return (
    <div class="phases" role="img" aria-label={text === "" ? "no time measured" : text}>
      {parts.map((phase) => (
        <span
          key={phase}
          class={phase}
          style={{ width: `${(100 * update.seconds[phase]!) / longest}%` }}
          title={`${WORDS[phase]} ${seconds(update.seconds[phase])}`}
        />
      ))}
    </div>
  );
}

export function PhaseLegend() {
  return (
    <ul class="legend" aria-label="Phases of an update">
      {PHASES.map((phase) => (
        <li key={phase}>
          <span class={`swatch ${phase}`} aria-hidden="true" />
          {WORDS[phase]}
        </li>
      ))}
    </ul>
  );
}
