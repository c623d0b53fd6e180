/** What happened at a point of a time axis: versions that went back, and holds. */

import type { LagSample, Version } from "./api.ts";

export interface Mark {
  /** Empty where nothing happened. */
  sign: string;
  text: string;
}

/** Empty texts: it did not happen. */
export function mark(back: string, hold: string): Mark {
  return { sign: back !== "" ? "↩" : hold !== "" ? "held" : "", text: [back, hold].filter((text) => text !== "").join(", ") };
}

/** To what a rollback, or a trainer that resumed from an older step or repeated one, went back; or empty. */
function wentBack({ step, same_as: same }: Version, before: Version | undefined): string {
  if (same != null && same !== before?.version) return `weights of version ${same}`;
  const stepBefore = before?.step ?? null;
  if (step === null || stepBefore === null || step > stepBefore) return "";
  return step < stepBefore ? `back from step ${stepBefore}` : `step ${step} again`;
}

/** By version; `versions`: newest first. Holds are known of the last hour. */
export function marksOf(versions: Version[], samples: LagSample[]): Map<number, Mark> {
  const held = samples.filter((sample) => sample.held !== "");
  return new Map(versions.map((each, at) => [each.version, markOf(each, versions[at + 1], held)]));
}

function markOf(each: Version, before: Version | undefined, held: LagSample[]): Mark {
  const [from, to] = [before?.created ?? null, each.created];
  const hold = from === null || to === null ? undefined : held.find(({ at }) => from < at && at < to);
  return mark(wentBack(each, before), hold === undefined ? "" : `after a hold: ${hold.held}`);
}
