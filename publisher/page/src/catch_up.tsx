import type { CatchUp, CatchUpRow } from "./api.ts";
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
          {joiner !== null && (
            <p class="joiner">
              A new host reads <strong>{bytes(joiner.bytes)}</strong>
              {joiner.seconds != null && <> in about {seconds(joiner.seconds)}</>}.
            </p>
          )}
          {rows.length > 0 && <Rows rows={rows} />}
        </>
      )}
    </Section>
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
