// As run_client.py, for examples in JavaScript: `node run_client.mjs FOLDER_OF_NODE_MODULES`.
import { unlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const folder = process.argv[2];
let runs = 0;
for await (const line of createInterface({ input: process.stdin })) {
  const { code, texts } = JSON.parse(line);
  // A module of its own, beside the packages that it imports.
  const path = join(folder, `example-${process.pid}-${runs++}.mjs`);
  const given = `const texts = ${JSON.stringify(texts)};\nconst query = texts[0];\n`;
  const left = ["vectors", "scores"].find((name) => code.includes(`const ${name} =`));
  writeFileSync(path, `${given}${code}\nexport { ${left} };\n`);
  let result;
  try {
    result = { [left]: (await import(pathToFileURL(path)))[left] };
  } catch (error) {
    result = { error: error.constructor.name, message: String(error.message) };
  } finally {
    unlinkSync(path);
  }
  process.stdout.write(`${JSON.stringify(result)}\n`);
}
