/** Repeats work while the tab is visible. */

/**
 * Calls `run` now, and then `seconds` after each call has ended. Pauses while the tab is hidden, and
 * calls at once when it is shown. Returns a function that stops this.
 */
export function repeat(seconds, run) {
  let stopped = false;
  let timer = 0;
  let running = false;

  const next = async () => {
    clearTimeout(timer);
    if (stopped || running || document.hidden) return;
    running = true;
    try {
      await run();
    } finally {
      running = false;
      if (!stopped) timer = setTimeout(next, seconds * 1000);
    }
  };

  document.addEventListener("visibilitychange", next);
  next();
  return () => {
    stopped = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", next);
  };
}
