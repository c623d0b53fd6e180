import type { CatchUp, CatchUpRow, Joiner } from "./api.ts";
import { Chart } from "./chart.tsx";
import { bytes, count, seconds } from "./format.ts";
import type { Part } from "./live.ts";
import { Section, Wide } from "./part.tsx";

export function CatchUpPart({ part }: { part: Part<CatchUp> }) {
  return (
    <Section id="catch-up" title="Cost to catch up" part={part}>
      {({ rows, joiner }) => (
        <>
          {rows.length > 0 && (
            <Chart title="Read by a host this many versions behind" names={rows.map((row) => count(row.lag))} values={rows.map((row) => row.bytes)} text={bytes} shape="line" />
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
  return (
    <details>
      <summary>As a table</summary>
      <Wide name="Cost to catch up as a table">
        <table>
          <thead>
            <tr>
              <th scope="col" class="number">
                Behind
              </th>
              <th scope="col" class="number">
                Read
              </th>
              <th scope="col" class="number">
                Takes about
              </th>
              <th scope="col">Way</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={row.lag}>
                <th scope="row" class="number">
                  {count(row.lag)}
                </th>
                <td class="number">{bytes(row.bytes)}</td>
                <td class="number">{seconds(row.seconds)}</td>
                <td>{way(row.steps)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Wide>
    </details>
  );
}

const SHOWN_STEPS = 6;

function way(steps: string[]): string {
  if (steps.length <= SHOWN_STEPS) return steps.join(", ");
  return `${steps.slice(0, SHOWN_STEPS - 1).join(", ")} and ${steps.length - SHOWN_STEPS + 1} more`;
}
