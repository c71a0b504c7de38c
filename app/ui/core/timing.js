/** Measures the time of a forward. */

import { embed } from "./api.js";

/** A longer wait in the queue, in milliseconds, means that the device is busy. */
const LONGEST_WAIT = 20;

/** Whether a request's `timings_ms` are those of a forward on an idle device. */
export const isFree = ({ queue, inference }) => queue < LONGEST_WAIT && inference > 0;

/** The milliseconds of a forward in the background; null if the device is busy. */
export async function timeForward(texts, model, options, signal) {
  try {
    const { report } = await embed(texts, model, options, { signal, background: true });
    return isFree(report.timings_ms) ? report.timings_ms.inference : null;
  } catch (error) {
    if (signal.aborted || !error.isTemporary) throw error;
    return null; // A full queue, or the rate limit.
  }
}
