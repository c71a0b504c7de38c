/** Texts to begin with. */

const MANUAL =
  "The boiler shows error E42 when the pump of the boiler is blocked. " +
  "Close the valve, open the lid of the pump and rinse the filter; " +
  "the error is gone when the water in the boiler is warm again.";

export const SAMPLES = {
  manual: MANUAL,
  several: [
    "The bank of the river was washed away by the flood.",
    "The bank raised the rate of the loan by half a percent.",
    "Python swallowed a rat. Python raised a KeyError.",
  ].join("\n\n"),
};

const SENTENCES = [
  "The night train leaves the harbour at ten and reaches the mountains before dawn.",
  "A conductor checks the tickets, a cook makes soup, and two students play chess by the window.",
  "Snow delays the freight from the north, so the signal at the junction stays red for an hour.",
  "In the last carriage a violin maker carries wood that was dried for thirty years.",
];

/** A text of more than `tokens` tokens, so that it is truncated. */
export function longText(tokens) {
  const words = Math.ceil(tokens * 1.15);
  const passage = SENTENCES.join(" ");
  const repeats = Math.ceil(words / passage.split(" ").length);
  return Array(repeats).fill(passage).join(" ");
}
