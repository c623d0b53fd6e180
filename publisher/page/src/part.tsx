import type { ComponentChildren } from "preact";
import type { Part } from "./live.ts";

/** What may be wider than the window, to be moved by keyboard too. */
export function Wide({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <div class="wide" tabIndex={0} role="region" aria-label={name}>
      {children}
    </div>
  );
}

/** Figures in rows. The first cell of each names it, the last `texts` are words, the others numbers. */
export function Table({ name, heads, rows, texts = 1 }: { name: string; heads: string[]; rows: string[][]; texts?: number }) {
  const kind = (at: number) => (at < heads.length - texts ? "number" : undefined);
  return (
    <Wide name={name}>
      <table>
        <thead>
          <tr>
            {heads.map((head, at) => (
              <th key={head} scope="col" class={kind(at)}>
                {head}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map(([first, ...others]) => (
            <tr key={first}>
              <th scope="row" class="number">
                {first}
              </th>
              {others.map((cell, at) => (
                <td key={at} class={kind(at + 1)}>
                  {cell}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </Wide>
  );
}

/** A section with its heading; `children` is called once there is a value. */
export function Section<T>({
  id,
  title,
  part,
  children,
}: {
  id: string;
  title: string;
  part: Part<T>;
  children: (value: T) => ComponentChildren;
}) {
  const { value, problem } = part;
  return (
    <section id={id} aria-labelledby={`${id}-title`}>
      <h2 id={`${id}-title`}>{title}</h2>
      {problem !== null && (
        <p class="none">
          Not available: {problem.message}. {problem.remedy}
        </p>
      )}
      {value === null && problem === null && <p class="none">Waiting for the publisher.</p>}
      {value !== null && children(value)}
    </section>
  );
}
