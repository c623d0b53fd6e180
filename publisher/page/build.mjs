// Bundles the page into the directory that is given: what the publisher serves, byte for byte the same anywhere.
import { build } from "esbuild";
import { copyFile, mkdir, readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { argv } from "node:process";

const target = argv[2] ?? "dist";

async function notices() {
  const { dependencies } = JSON.parse(await readFile("package.json", "utf8"));
  const parts = [];
  for (const name of Object.keys(dependencies).sort()) {
    const home = join("node_modules", name);
    const { version, license } = JSON.parse(await readFile(join(home, "package.json"), "utf8"));
    const text = await readFile(join(home, "LICENSE"), "utf8");
    parts.push(`${name} ${version} (${license})\n\n${text.replaceAll("\r\n", "\n").trim()}\n`);
  }
  return parts.join(`\n${"-".repeat(80)}\n\n`);
}

await rm(target, { recursive: true, force: true });
await mkdir(target, { recursive: true });
await build({
  entryPoints: { page: "src/main.tsx" },
  outdir: target,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  charset: "utf8",
  legalComments: "none",
  banner: { js: "// Notices of what is bundled here: licenses.txt" },
  logLevel: "warning",
});
await copyFile("src/index.html", join(target, "index.html"));
await copyFile("src/icon.svg", join(target, "icon.svg"));
await writeFile(join(target, "licenses.txt"), await notices());
