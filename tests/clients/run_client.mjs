// As run_client.py, for examples in JavaScript: `node run_client.mjs FOLDER_OF_NODE_MODULES`.
import { readFileSync, unlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const { code, runs } = JSON.parse(readFileSync(0, "utf8"));
const folder = process.argv[2];
const results = [];
for (const [place, { texts, replace }] of runs.entries()) {
  let example = code;
  for (const [from, to] of Object.entries(replace)) example = example.replaceAll(from, to);
  // A module of its own, beside the packages that it imports.
  const path = join(folder, `example-${process.pid}-${place}.mjs`);
  writeFileSync(path, `const texts = ${JSON.stringify(texts)};\n${example}\nexport { vectors };\n`);
  try {
    results.push({ vectors: (await import(pathToFileURL(path))).vectors });
  } catch (error) {
    results.push({ error: error.constructor.name, message: String(error.message) });
  } finally {
    unlinkSync(path);
  }
}
console.log(JSON.stringify(results));
