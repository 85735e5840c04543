// Prints what @huggingface/jinja makes of each case of a JSON file: a list of
// {"text": ...} or {"error": ...}. A case is a template and its variables; the
// time is fixed.
//   node render.mjs LIBRARY cases.json
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [library, file] = process.argv.slice(2);
const { Template } = await import(pathToFileURL(library));

// For strftime_now.
const Time = Date;
globalThis.Date = class extends Time {
  constructor(...args) {
    super(...(args.length ? args : [2026, 2, 5, 7, 8, 9]));
  }
};

const out = [];
for (const { template, vars } of JSON.parse(readFileSync(file, "utf8"))) {
  try {
    out.push({ text: new Template(template).render(vars) });
  } catch (e) {
    out.push({ error: String(e.message ?? e) });
  }
}
process.stdout.write(JSON.stringify(out));
