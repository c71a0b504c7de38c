/** A query and passages to begin with. */

export const QUERY = "Why is the water in my boiler cold?";

export const PASSAGES = [
  "If the tap stays cold, the heating element of the boiler has failed or the pump is blocked.",
  "The boiler holds eighty litres of water and is made of steel.",
  "A cold drink of water is welcome on a hot day by the river.",
  "No warm shower? Check whether the safety switch of the heater has tripped.",
].join("\n\n");
