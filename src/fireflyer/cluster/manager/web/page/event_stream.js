// Server-sent events over fetch. EventSource can send no header of ours, does not tell which status was answered, and
// gives up for good at the first one that is not 200.

const MAX_EVENT_CHARS = 4 << 20;

// Calls `heard(data, id)` for each event, in order, until the answer ends.
export async function readEvents(response, heard) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = { data: [], id: null };
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    if (rest.length > MAX_EVENT_CHARS) throw new Error("the platform sent an event that is too long");
    // A carriage return at the very end may be half of CR LF.
    const whole = rest.endsWith("\r") ? rest.length - 1 : rest.length;
    const lines = rest.slice(0, whole).split(/\r\n|\n|\r/);
    rest = lines.pop() + rest.slice(whole);
    for (const line of lines) event = take(line, event, heard);
  }
}

function take(line, event, heard) {
  if (line === "") {
    const data = event.data.join("\n");
    if (data) heard(data, event.id); // an event without data is none, as in EventSource: comments come so
    return { data: [], id: null };
  }
  const [, name, value] = /^([^:]*):? ?(.*)$/s.exec(line);
  if (name === "data") event.data.push(value);
  if (name === "id") event.id = value;
  return event;
}
