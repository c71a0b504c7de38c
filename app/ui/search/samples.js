/** A small handbook to search in, a passage in each paragraph. */

export const QUERY = "What does error E42 mean?";

const PASSAGES = [
  "Error E42: the circulation pump is blocked. Switch the boiler off, open the pump and remove what holds the wheel.",
  "Error E43: the lid of the combustion chamber is open. The boiler starts again when the lid is shut.",
  "Error E17: no flame was seen after three attempts. Check whether the gas tap is open before you call anybody.",
  "Codes that begin with E are faults that stop the boiler. Codes that begin with W are warnings, and the boiler goes on.",
  "The display shows a fault as a letter and two digits. The tables at the end of this handbook say what each one means.",
  "A pump that hums but does not turn is stuck. This happens after a long summer, when scale has settled on its wheel.",
  "Warning W05: the pressure of the water is below one bar. Fill the system until the needle is in the green field.",
  "After spare part E42-118 has been fitted, the installer writes its number and the date on the card in the door.",
  "If the tap stays cold although the heating works, the valve that gives hot water priority does not move.",
  "The house gets warm slowly when there is air in the radiators. Bleed them, the highest one last.",
  "Radiators that are cold at the top hold air; those that are cold at the bottom hold mud and must be flushed.",
  "The night setting lowers the room temperature by four degrees from ten in the evening until six in the morning.",
  "To reset the boiler after a fault, hold the round button for five seconds until the display goes dark.",
  "Do not reset more than three times. A fault that comes back has a cause that a reset does not remove.",
  "The chimney sweep measures the exhaust gas once a year and leaves a report, which the owner keeps for two years.",
  "The filter before the pump catches rust and sand. Rinse it every autumn, before the first cold week.",
  "A frost sensor starts the circulation by itself as soon as the water in the pipes is colder than five degrees.",
  "The gas meter is read on the last day of the month. Write the numbers before the comma into the table.",
  "In the app the history lists every fault with its time, and how long the boiler stood still because of it.",
  "The expansion vessel takes up the water that heat makes larger. If the pressure swings, its membrane is torn.",
  "For a family of four the tank holds one hundred and fifty litres, enough for three showers one after another.",
  "Once a week the tank is heated to sixty degrees so that no legionella grow in it.",
  "The installer sets the heating curve: how warm the water must be for each degree that it is colder outside.",
  "Leaking joints show as white or green crusts on the pipe long before there is a drop on the floor.",
  "The guarantee covers the heat exchanger for ten years and all moving parts, such as pumps and fans, for two.",
  "Call the emergency line only if it smells of gas. Open the windows, touch no switch, and leave the house first.",
];

export const CORPUS = PASSAGES.join("\n\n");
