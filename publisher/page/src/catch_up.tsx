import type { CatchUp, CatchUpRow, Joiner } from "./api.ts";
import { Chart } from "./chart.tsx";
import { bytes, count, seconds } from "./format.ts";
import type { Part } from "./live.ts";
import { Section, Table } from "./part.tsx";

export function CatchUpPart({ part }: { part: Part<CatchUp> }) {
  return (
    <Section id="catch-up" title="Cost to catch up" part={part}>
      {({ rows, joiner }) => (
        <>
          {rows.length > 0 && (
            <Chart title="Read by a host so many versions behind" names={rows.map((row) => `${count(row.lag)} behind`)} values={rows.map((row) => row.bytes)} text={bytes} shape="line" />
          )}
          <Joining joiner={joiner} />
          {rows.length > 0 && <Rows rows={rows} />}
        </>
      )}
    </Section>
  );
}

function Joining({ joiner }: { joiner: Joiner }) {
  const { bytes: nbytes, seconds: takes, without_base: bare } = joiner;
  if (nbytes === null && bare === null) return <p class="none">Nothing leads a new host to the newest version yet.</p>;
  return (
    <p class="joiner">
      {nbytes !== null && (
        <>
          A new host with the base reads <strong>{bytes(nbytes)}</strong>
          {takes !== null && <> in about {seconds(takes)}</>}.{" "}
        </>
      )}
      {bare === null ? (
        "Without the base none can join: the channel has no anchor."
      ) : (
        <>
          Without the base it reads <strong>{bytes(bare.bytes)}</strong>.
        </>
      )}
    </p>
  );
}

function Rows({ rows }: { rows: CatchUpRow[] }) {
  const cells = rows.map((row) => [count(row.lag), bytes(row.bytes), seconds(row.seconds), way(row.steps)]);
  return (
    <details>
      <summary>As a table</summary>
      <Table name="Cost to catch up as a table" heads={["Behind", "Read", "Takes about", "Way"]} rows={cells} />
    </details>
  );
}

const SHOWN_STEPS = 6;

function way(steps: string[]): string {
  if (steps.length <= SHOWN_STEPS) return steps.join(", ");
  return `${steps.slice(0, SHOWN_STEPS - 1).join(", ")} and ${steps.length - SHOWN_STEPS + 1} more`;
}
