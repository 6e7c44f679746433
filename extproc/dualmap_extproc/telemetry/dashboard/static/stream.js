// The stream of snapshots: opened for one pool, opened again by itself when it breaks, and watched for silence.

const SILENCE_MS = 3500; // A snapshot comes every second.
const RETRY_MS = [500, 1000, 2000, 5000];

/**
 * Open the stream; `onSnapshot(document)` gets each one, `onState(state, silentMs)` is told twice a second whether it
 * is "connecting", "live" or "lost", and for how long nothing came.
 */
export function openStream(onSnapshot, onState) {
  let source = null;
  let pool = "";
  let heard = null;
  let failures = 0;
  let opened = 0;
  let timer = null;

  function open() {
    clearTimeout(timer);
    source?.close();
    opened = performance.now();
    source = new EventSource(`events?pool=${encodeURIComponent(pool)}`);
    source.onmessage = (event) => {
      heard = performance.now();
      failures = 0;
      onSnapshot(JSON.parse(event.data));
      tell();
    };
    source.onerror = retry;
  }

  function retry() {
    source.close();
    clearTimeout(timer);
    timer = setTimeout(open, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
    failures += 1;
    tell();
  }

  function tell() {
    const silent = heard === null ? null : performance.now() - heard;
    if (heard === null) onState(failures ? "lost" : "connecting", null);
    else onState(silent > SILENCE_MS || failures > 0 ? "lost" : "live", silent);
  }

  setInterval(() => {
    // A connection that died without a word, as when the network went away, brings no error: open another one.
    const quiet = performance.now() - Math.max(heard ?? 0, opened);
    if (source.readyState !== EventSource.CLOSED && quiet > 3 * SILENCE_MS) open();
    tell();
  }, 500);

  return {
    /** Look at another pool ("" is the router's first). */
    watch(name) {
      pool = name;
      failures = 0;
      open();
    },
  };
}
