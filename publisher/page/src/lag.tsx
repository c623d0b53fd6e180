import type { Fleet } from "./api.ts";
import { binned } from "./bins.ts";
import { Chart } from "./chart.tsx";
import { count } from "./format.ts";

export function LagPart({ fleet }: { fleet: Fleet | null }) {
  return (
    <section id="lag" aria-labelledby="lag-title">
      <h2 id="lag-title">Lag</h2>
      {fleet === null || fleet.hosts.length === 0 ? <p class="none">No host has reported yet.</p> : <Lags fleet={fleet} />}
    </section>
  );
}

function Lags({ fleet }: { fleet: Fleet }) {
  const bins = binned(fleet.lag);
  return (
    <>
      <Chart title="Hosts by versions behind" names={bins.map(({ name }) => name)} values={bins.map(({ hosts }) => hosts)} text={hosts} shape="bars" />
      <details>
        <summary>As a table</summary>
        <table>
          <thead>
            <tr>
              <th scope="col" class="number">
                Versions behind
              </th>
              <th scope="col" class="number">
                Hosts
              </th>
            </tr>
          </thead>
          <tbody>
            {bins.map((bin) => (
              <tr key={bin.name}>
                <th scope="row" class="number">
                  {bin.name}
                </th>
                <td class="number">{count(bin.hosts)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </details>
    </>
  );
}

/** Between two hosts there is nothing to name. */
function hosts(value: number): string {
  return Number.isInteger(value) ? count(value) : "";
}
