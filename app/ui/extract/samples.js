/** Texts to begin with. */

export const TEXTS = [
  "Ada Lovelace was born in London and worked with Charles Babbage.",
  "In 1903 Marie Curie received the Nobel Prize in Stockholm.",
].join("\n\n");
