import type { Planned, PrunePlan } from "./api.ts";
import { bytes, count, version } from "./format.ts";
import type { Part } from "./live.ts";
import { Section, Table } from "./part.tsx";

export function PlanPart({ part }: { part: Part<PrunePlan> }) {
  return (
    <Section id="pruning" title="Pruning" part={part}>
      {(plan) => (
        <>
          <p class="plan">
            {plan.remove.length === 0 ? (
              `Pruning now would remove nothing${plan.why_not === "" ? "" : `: ${plan.why_not}`}.`
            ) : (
              <>
                Pruning now would remove <strong>{versions(plan.remove.length)}</strong> and free{" "}
                <strong>{bytes(sum(plan.remove))}</strong>; {versions(plan.keep.length)} with {bytes(sum(plan.keep))} would stay.
              </>
            )}
          </p>
          <div class="pair">
            <Rows title="Would go" rows={plan.remove} />
            <Rows title="Would stay" rows={plan.keep} />
          </div>
        </>
      )}
    </Section>
  );
}

function Rows({ title, rows }: { title: string; rows: Planned[] }) {
  if (rows.length === 0) return null;
  return (
    <details>
      <summary>
        {title}: {versions(rows.length)}
      </summary>
      <Table name={title} heads={["Version", "Bytes", "Why"]} rows={rows.map((row) => [version(row.version), bytes(row.bytes), row.why])} />
    </details>
  );
}

function versions(number: number): string {
  return `${count(number)} ${number === 1 ? "version" : "versions"}`;
}

function sum(rows: Planned[]): number {
  return rows.reduce((all, row) => all + row.bytes, 0);
}
