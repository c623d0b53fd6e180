/** The lags of a fleet in few bins: exact up to ten, then doubling. */

import type { LagCount } from "./api.ts";

export interface Bin {
  name: string;
  hosts: number;
}

const EXACT = 10;

export function binned(counts: readonly LagCount[]): Bin[] {
  const known = counts.map(({ lag, hosts }) => ({ lag: Math.max(lag, 0), hosts }));
  const edges = edgesTo(Math.max(0, ...known.map(({ lag }) => lag)));
  const bins = edges.map(([low, high]) => ({ name: low === high ? `${low}` : `${low}–${high}`, hosts: 0 }));
  for (const { lag, hosts } of known) bins[edges.findIndex(([, high]) => lag <= high)]!.hosts += hosts;
  return bins;
}

function edgesTo(most: number): [number, number][] {
  const edges: [number, number][] = [];
  for (let low = 0; low <= Math.max(most, 4); ) {
    const high = low < EXACT ? low : low * 2 - 1;
    edges.push([low, high]);
    low = high + 1;
  }
  return edges;
}
