// A small NATS client over WebSocket: connect, subscribe, publish, request.
// https://docs.nats.io/reference/reference-protocols/nats-protocol

const encoder = new TextEncoder();
const decoder = new TextDecoder();

export class NatsSocket {
  #socket;
  #buffer = new Uint8Array(0);
  #handlers = new Map();
  #waiting = new Map();
  #nextSid = 1;
  #nextReply = 1;
  #inbox = `_INBOX.${crypto.randomUUID().replaceAll("-", "")}`;
  #introduced = false;
  #ready;
  #end;

  // Resolves when the server has accepted the connection; `options` may hold user and pass.
  static async connect(url, options = {}) {
    const connection = new NatsSocket();
    await connection.#open(url, options);
    return connection;
  }

  #open(url, options) {
    this.closed = new Promise((resolve) => (this.#end = resolve));
    return new Promise((resolve, reject) => {
      this.#ready = { resolve, reject, options };
      this.#socket = new WebSocket(url);
      this.#socket.binaryType = "arraybuffer";
      this.#socket.onmessage = ({ data }) => this.#receive(new Uint8Array(data));
      this.#socket.onerror = () => reject(new Error(`no NATS over WebSocket at ${url}`));
      this.#socket.onclose = () => {
        reject(new Error("the connection was closed"));
        for (const { reject: fail } of this.#waiting.values()) fail(new Error("connection lost"));
        this.#end();
      };
    });
  }

  close() {
    this.#socket.close();
  }

  // Calls handler({subject, reply, headers, data}) for each message; data is a Uint8Array.
  subscribe(subject, handler) {
    const sid = this.#nextSid++;
    this.#handlers.set(sid, handler);
    this.#send(`SUB ${subject} ${sid}\r\n`);
    return () => {
      this.#handlers.delete(sid);
      this.#send(`UNSUB ${sid}\r\n`);
    };
  }

  publish(subject, text = "", reply = "") {
    const size = encoder.encode(text).length;
    this.#send(`PUB ${subject} ${reply ? reply + " " : ""}${size}\r\n${text}\r\n`);
  }

  // Sends a request and returns the answer; rejects if there is no answer in time.
  request(subject, text = "", timeout = 5000) {
    const token = String(this.#nextReply++);
    return new Promise((resolve, reject) => {
      const timer = setTimeout(() => reject(new Error(`no answer from ${subject}`)), timeout);
      const finish = (settle) => (value) => {
        clearTimeout(timer);
        this.#waiting.delete(token);
        settle(value);
      };
      this.#waiting.set(token, { resolve: finish(resolve), reject: finish(reject) });
      this.publish(subject, text, `${this.#inbox}.${token}`);
    });
  }

  #send(text) {
    this.#socket.send(encoder.encode(text));
  }

  #receive(bytes) {
    const joined = new Uint8Array(this.#buffer.length + bytes.length);
    joined.set(this.#buffer);
    joined.set(bytes, this.#buffer.length);
    let at = 0;
    for (;;) {
      const used = this.#step(joined, at);
      if (used === 0) break;
      at += used;
    }
    this.#buffer = joined.slice(at);
  }

  // Handles one protocol message; returns its length, or 0 if it is not complete yet.
  #step(bytes, at) {
    let end = at;
    while (end + 1 < bytes.length && !(bytes[end] === 13 && bytes[end + 1] === 10)) end++;
    if (end + 1 >= bytes.length) return 0;
    const line = decoder.decode(bytes.subarray(at, end));
    const size = end + 2 - at;
    const [word, ...words] = line.split(/\s+/);
    if (word === "MSG" || word === "HMSG") {
      const headed = word === "HMSG";
      const total = Number(words.at(-1));
      const head = headed ? Number(words.at(-2)) : 0;
      const start = end + 2;
      if (bytes.length < start + total + 2) return 0;
      const reply = words.length === (headed ? 5 : 4) ? words[2] : "";
      this.#deliver(Number(words[1]), {
        subject: words[0],
        reply,
        headers: headed ? decoder.decode(bytes.subarray(start, start + head)) : "",
        data: bytes.slice(start + head, start + total),
      });
      return size + total + 2;
    }
    if (word === "INFO") {
      // Later INFO messages only report changes in the cluster.
      if (!this.#introduced) this.#introduce();
    } else if (word === "PING") this.#send("PONG\r\n");
    else if (word === "PONG") {
      this.subscribe(`${this.#inbox}.*`, (message) => this.#answer(message));
      this.#ready.resolve();
    } else if (word === "-ERR") {
      this.#ready.reject(new Error(line));
      this.#socket.close();
    }
    return size;
  }

  #introduce() {
    this.#introduced = true;
    const { user, pass } = this.#ready.options;
    const options = { verbose: false, pedantic: false, lang: "js", version: "1", protocol: 1,
      headers: true, no_responders: true, user, pass };
    this.#send(`CONNECT ${JSON.stringify(options)}\r\nPING\r\n`);
  }

  #answer(message) {
    const waiting = this.#waiting.get(message.subject.split(".").at(-1));
    if (!waiting) return;
    if (message.headers.startsWith("NATS/1.0 503")) waiting.reject(new Error("no service answers"));
    else waiting.resolve(message.data);
  }

  #deliver(sid, message) {
    this.#handlers.get(sid)?.(message);
  }
}
