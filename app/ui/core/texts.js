/** The texts of a field: an empty line begins the next one. */
export function splitTexts(value) {
  return value
    .split(/\n[ \t]*\n/)
    .map((text) => text.trim())
    .filter(Boolean);
}
