// Prints what @huggingface/tokenizers makes of each text of a JSON file: a line
// of ids without special tokens, then a line with them.
//   node encode.mjs LIBRARY tokenizer.json tokenizer_config.json texts.json
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [library, tokenizer, config, texts] = process.argv.slice(2);
const { Tokenizer } = await import(pathToFileURL(library));
const read = (name) => JSON.parse(readFileSync(name, "utf8"));
const t = new Tokenizer(read(tokenizer), read(config));
const lines = [];
for (const text of read(texts)) {
  lines.push(t.encode(text, { add_special_tokens: false }).ids.join(" "));
  lines.push(t.encode(text).ids.join(" "));
}
process.stdout.write(lines.join("\n") + "\n");
