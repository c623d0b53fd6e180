import type { ComponentChildren } from "preact";
import type { Standing } from "./api.ts";

const WORDS: Record<Standing, string> = {
  lost: "Lost",
  failed: "Failed",
  stale: "Stale",
  behind: "Behind",
  ready: "Up to date",
  stopped: "Stopped",
};

/** Shapes, so that no standing is told by its colour alone. */
const SHAPES: Record<Standing, ComponentChildren> = {
  stopped: <rect x="2" y="5" width="8" height="2" />,
  ready: <circle cx="6" cy="6" r="4.5" />,
  behind: <path d="M6 1.2 11 10.4H1z" />,
  stale: <circle cx="6" cy="6" r="3.8" fill="none" stroke="currentColor" stroke-width="1.6" stroke-dasharray="2.4 1.6" />,
  failed: <path d="M1.5 1.5h9v9h-9z" />,
  lost: <path d="M2 2l8 8M10 2l-8 8" fill="none" stroke="currentColor" stroke-width="2.2" stroke-linecap="round" />,
};

/** `atTarget`: a host at its target is not behind, whatever keeps it from being ready. */
export function Badge({ standing, atTarget = false }: { standing: Standing; atTarget?: boolean }) {
  return (
    <span class={`badge ${standing}`}>
      <svg viewBox="0 0 12 12" width="12" height="12" fill="currentColor" aria-hidden="true">
        {SHAPES[standing]}
      </svg>
      {standing === "behind" && atTarget ? "Not ready" : WORDS[standing]}
    </span>
  );
}
