// One table of a bridge that runs with --json: its snapshot, then every transaction after it.

const decoder = new TextDecoder();
const fromJson = (bytes) => JSON.parse(decoder.decode(bytes));
const fromBase64 = (text) => fromJson(Uint8Array.from(atob(text), (char) => char.charCodeAt(0)));
// JSON carries integers beyond 2^53 as text.
const lsn = (value) => BigInt(value);

export class LiveTable {
  rows = new Map();
  columns = [];

  // `table` is the table as written in subjects: users, sales.orders, Odd=20Table.
  constructor(nats, table, prefix = "") {
    this.nats = nats;
    this.table = table;
    this.dot = prefix ? `${prefix}.` : "";
    this.line = prefix ? `${prefix}_` : "";
  }

  // Loads the snapshot and follows; calls changed(keys) after each transaction that touched rows.
  // Returns a promise that rejects when a gap is found or the connection is lost: start over then.
  async follow(changed) {
    await this.#loadSchema();
    const meta = await this.#snapshot();
    for (let number = 0; number < meta.batch_count; number++) {
      const subject = `${this.dot}init.snap.${this.table}.${meta.snapshot_id}.${number}`;
      const chunk = fromBase64((await this.#stored(`${this.line}INIT`, subject)).data);
      for (const row of chunk.data) this.#put(row);
    }
    changed([...this.rows.keys()]);
    await this.#follow(meta, changed);
  }

  async #loadSchema() {
    const subject = `$KV.${this.line}schemas.${this.table}`;
    const entry = await this.#stored(`KV_${this.line}schemas`, subject);
    const schema = fromBase64(entry.data);
    this.columns = schema.columns.map((column) => column.name);
    const identity = schema.columns.filter((column) => column.is_key).map((column) => column.name);
    this.key = schema.primary_key.length ? schema.primary_key : identity;
  }

  async #snapshot() {
    const metas = `${this.dot}init.meta.${this.table}`;
    const request = `${this.dot}snapshot.request.${this.table}`;
    const options = JSON.stringify({ format: "json", zstd: false });
    const answer = fromJson(await this.nats.request(request, options));
    if (!answer.ok) throw new Error(answer.error);
    for (let tries = 0; tries < 600; tries++) {
      const stored = await this.#stored(`${this.line}INIT`, metas).catch(() => null);
      const meta = stored && fromBase64(stored.data);
      if (meta?.snapshot_id === answer.snapshot_id) return meta;
      await new Promise((resolve) => setTimeout(resolve, 100));
    }
    throw new Error("the snapshot did not complete in time");
  }

  async #follow(meta, changed) {
    const stream = `${this.line}CDC`;
    const info = await this.#api(`STREAM.INFO.${stream}`);
    if (info.state.first_seq > meta.cdc_seq) throw new Error("the stream was trimmed");
    let delivered = 0;
    let heard = Date.now();
    let pending = [];
    let ended = null;
    let epoch = meta.epoch;
    await new Promise((_, reject) => {
      const take = (message) => {
        heard = Date.now();
        if (!message.reply.startsWith("$JS.ACK.")) return;
        const tokens = message.reply.split(".");
        if (Number(tokens.at(tokens.length === 9 ? 6 : 8)) !== ++delivered) {
          reject(new Error("a message was lost"));
          return;
        }
        const event = fromJson(message.data);
        if (event.epoch !== epoch) {
          reject(new Error("a new epoch began"));
        } else if (event.lsn !== ended && lsn(event.lsn) >= lsn(meta.lsn)) {
          pending.push(event);
          if (event.last || event.operation === "COMMIT") {
            ended = event.lsn;
            changed(pending.flatMap((one) => this.#apply(one)));
            pending = [];
          }
        }
      };
      const inbox = `_INBOX.${crypto.randomUUID()}`;
      this.nats.subscribe(inbox, (message) => {
        try {
          take(message);
        } catch (error) {
          reject(error);
        }
      });
      const config = {
        deliver_subject: inbox,
        deliver_policy: "by_start_sequence",
        opt_start_seq: meta.cdc_seq,
        filter_subject: `${this.dot}cdc.${this.table}.*`,
        ack_policy: "none",
        mem_storage: true,
        num_replicas: 1,
        idle_heartbeat: 5e9,
        inactive_threshold: 30e9,
      };
      this.#api(`CONSUMER.CREATE.${stream}`, { stream_name: stream, config }).catch(reject);
      const watch = setInterval(() => {
        if (Date.now() - heard > 15000) reject(new Error("the stream is silent"));
      }, 1000);
      this.nats.closed.then(() => {
        clearInterval(watch);
        reject(new Error("the connection was lost"));
      });
    });
  }

  // Applies one change and returns the keys it touched.
  #apply(event) {
    if (event.operation === "TRUNCATE") {
      this.rows.clear();
      return [];
    }
    const changes = event.rows ?? [event];
    return changes.flatMap(({ data, old, unchanged }) => {
      if (!data || !["INSERT", "UPDATE", "DELETE"].includes(event.operation)) return [];
      const before = this.#keyOf({ ...data, ...old });
      const kept = this.rows.get(before) ?? {};
      this.rows.delete(before);
      if (event.operation === "DELETE") return [before];
      const row = { ...data };
      for (const name of unchanged ?? []) row[name] = kept[name];
      return [this.#put(row)];
    });
  }

  #put(row) {
    const key = this.#keyOf(row);
    this.rows.set(key, row);
    return key;
  }

  #keyOf(row) {
    return JSON.stringify(this.key.map((name) => row[name]));
  }

  async #stored(stream, subject) {
    return (await this.#api(`STREAM.MSG.GET.${stream}`, { last_by_subj: subject })).message;
  }

  async #api(subject, body = null) {
    const text = body === null ? "" : JSON.stringify(body);
    const answer = fromJson(await this.nats.request(`$JS.API.${subject}`, text));
    if (answer.error) throw new Error(answer.error.description);
    return answer;
  }
}
