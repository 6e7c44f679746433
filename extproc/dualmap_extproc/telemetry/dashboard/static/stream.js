// The stream of snapshots of one pool. The stream reconnects after an error, and detects a connection without
// snapshots.

const SILENCE_MS = 3500; // A snapshot arrives every second.
const RETRY_MS = [500, 1000, 2000, 5000];

/**
 * Opens the stream. `onSnapshot(document)` receives each snapshot. `onState(state, silentMs)` is called twice a second
 * with "connecting", "live" or "lost" and the time since the last snapshot.
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
    // A network failure may cause no error event, so the script opens another connection.
    const quiet = performance.now() - Math.max(heard ?? 0, opened);
    if (source.readyState !== EventSource.CLOSED && quiet > 3 * SILENCE_MS) open();
    tell();
  }, 500);

  return {
    /** Switches to another pool ("" is the router's first). */
    watch(name) {
      pool = name;
      failures = 0;
      open();
    },
  };
}
