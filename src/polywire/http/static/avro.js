// Decodes Avro values for display: files, which contain their schema, and single values with a schema that the user enters. The browser decodes
// them, not the broker, so that a hostile value costs only its viewer. Every loop has a limit.
const ITEMS_MAX = 20000;  // values of one record, or file
const DEPTH_MAX = 64;
const BYTES_MAX = 16 * 1024 * 1024;  // of one block when it is unpacked
const MAGIC = [0x4f, 0x62, 0x6a, 1];
const text = new TextDecoder();

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
    this.items = 0;
  }

  take(count) {
    if (!(count >= 0) || this.at + count > this.bytes.length) throw new Error("the value ends too early");
    this.at += count;
    return this.bytes.subarray(this.at - count, this.at);
  }

  long() {
    let value = 0n;
    for (let shift = 0n; shift < 70n; shift += 7n) {
      const [byte] = this.take(1);
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return BigInt.asIntN(64, (value >> 1n) ^ -(value & 1n));
    }
    throw new Error("a number is too long");
  }

  count() { return Number(this.long()); }
  string() { return text.decode(this.take(this.count())); }

  // Blocks of an array or a map, each with its count; a negative one has its size behind it.
  blocks(each) {
    for (let count = this.count(); count !== 0; count = this.count()) {
      if (count < 0) { this.long(); count = -count; }
      for (; count > 0; count -= 1) each();
    }
  }
}

const hex = (bytes) => "0x" + [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
const plain = (value) => (value >= Number.MIN_SAFE_INTEGER && value <= Number.MAX_SAFE_INTEGER ? Number(value) : String(value));

function decimal(bytes, scale) {
  let value = 0n;
  for (const byte of bytes) value = (value << 8n) | BigInt(byte);
  value = BigInt.asIntN(Math.max(8 * bytes.length, 1), value);
  if (!(scale > 0 && scale < 1000)) return String(value);
  const digits = String(value < 0n ? -value : value).padStart(scale + 1, "0");
  return (value < 0n ? "-" : "") + digits.slice(0, -scale) + "." + digits.slice(-scale);
}

function instant(value, perMs) {
  const date = new Date(Number(value) / perMs);
  return Number.isNaN(date.getTime()) ? plain(value) : date.toISOString();
}

// What a number or bytes stand for, where the schema says so.
function logical(schema, value) {
  switch (schema.logicalType) {
    case "decimal": return decimal(value, schema.scale || 0);
    case "date": return instant(value * 86400000n, 1).slice(0, 10);
    case "timestamp-millis": case "local-timestamp-millis": return instant(value, 1);
    case "timestamp-micros": case "local-timestamp-micros": return instant(value, 1000);
    default: return value;
  }
}

const displayed = (value) => (typeof value === "bigint" ? plain(value) : value instanceof Uint8Array ? hex(value) : value);

export class Schema {
  constructor(json) {
    this.names = new Map();
    this.root = this.note(typeof json === "string" ? JSON.parse(json) : json, "", 0);
  }

  // Registers named types, so that the schema can refer to them by name.
  note(type, space, depth) {
    if (depth > DEPTH_MAX) throw new Error("the schema is nested too deeply");
    if (Array.isArray(type)) return type.map((one) => this.note(one, space, depth + 1));
    if (type === null || typeof type !== "object") return typeof type === "string" && !type.includes(".") && space ? { type, space } : { type };
    const own = { ...type };
    if (typeof type.name === "string") {
      const at = type.name.lastIndexOf(".");
      own.space = at >= 0 ? type.name.slice(0, at) : type.namespace || space;
      this.names.set((own.space ? own.space + "." : "") + type.name.slice(at + 1), own);
    }
    const inside = own.space || space;
    if (type.fields) own.fields = type.fields.map((field) => ({ name: field.name, type: this.note(field.type, inside, depth + 1) }));
    if (type.items !== undefined) own.items = this.note(type.items, inside, depth + 1);
    if (type.values !== undefined) own.values = this.note(type.values, inside, depth + 1);
    if (typeof type.type === "object") own.inner = this.note(type.type, inside, depth + 1);
    return own;
  }

  read(reader, type = this.root, depth = 0) {
    reader.items += 1;
    if (reader.items > ITEMS_MAX) throw new Error(`the value has more than ${ITEMS_MAX} items`);
    if (depth > DEPTH_MAX) throw new Error("the value is nested too deeply");
    if (Array.isArray(type)) {
      const branch = type[reader.count()];
      if (branch === undefined) throw new Error("a union has no such branch");
      return this.read(reader, branch, depth + 1);
    }
    if (type.inner) return this.read(reader, type.inner, depth + 1);
    switch (type.type) {
      case "null": return null;
      case "boolean": return reader.take(1)[0] !== 0;
      case "int": case "long": return displayed(logical(type, reader.long()));
      case "float": return reader.view.getFloat32((reader.take(4), reader.at - 4), true);
      case "double": return reader.view.getFloat64((reader.take(8), reader.at - 8), true);
      case "bytes": return displayed(logical(type, reader.take(reader.count())));
      case "fixed": return displayed(logical(type, reader.take(type.size)));
      case "string": return reader.string();
      case "enum": return type.symbols[reader.count()];
      case "array": { const found = []; reader.blocks(() => found.push(this.read(reader, type.items, depth + 1))); return found; }
      case "map": { const found = Object.create(null); reader.blocks(() => { found[reader.string()] = this.read(reader, type.values, depth + 1); }); return found; }
      case "record": case "error": {
        const found = Object.create(null);
        for (const field of type.fields) found[field.name] = this.read(reader, field.type, depth + 1);
        return found;
      }
    }
    const named = this.names.get((type.space ? type.space + "." : "") + type.type) || this.names.get(type.type);
    if (!named) throw new Error(`the schema has no type ${String(type.type).slice(0, 80)}`);
    return this.read(reader, named, depth + 1);
  }
}

export const isFile = (bytes) => MAGIC.every((byte, at) => bytes[at] === byte);

// Some writers leave part of zlib's checksum after a block.
async function inflated(bytes) {
  for (const behind of [0, 3, 4]) {
    try { return await unpacked(bytes.subarray(0, bytes.length - behind)); } catch (error) {
      if (behind === 4 || !(error instanceof TypeError)) throw error;
    }
  }
  throw new Error("a block cannot be decompressed");
}

async function unpacked(bytes) {
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  const parts = [];
  let size = 0;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    size += part.value.length;
    if (size > BYTES_MAX) throw new Error("a block is too large");
    parts.push(part.value);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

async function file(bytes) {
  const reader = new Reader(bytes), facts = new Map(), found = [];
  reader.take(MAGIC.length);
  reader.blocks(() => facts.set(reader.string(), text.decode(reader.take(reader.count()))));
  const schema = new Schema(facts.get("avro.schema") || "null"), codec = facts.get("avro.codec") || "null";
  reader.take(16);
  while (reader.at < bytes.length) {
    const count = reader.count(), packed = reader.take(reader.count());
    reader.take(16);
    if (codec !== "null" && codec !== "deflate") throw new Error(`the console does not support the codec ${codec.slice(0, 80)}`);
    const block = new Reader(codec === "null" ? packed : await inflated(packed));
    block.items = found.length;
    for (let at = 0; at < count; at += 1) {
      found.push(schema.read(block));
      if (found.length > ITEMS_MAX) throw new Error(`the file has more than ${ITEMS_MAX} records`);
    }
  }
  return found;
}

// Decodes the records of a file, or one value with the given schema: bare, in the single-object encoding, or after the five bytes of a schema registry.
export async function decoded(bytes, schemaText) {
  if (isFile(bytes)) return file(bytes);
  if (!schemaText.trim()) throw new Error("this is not an Avro file: enter the schema it was written with");
  const schema = new Schema(schemaText);
  const starts = bytes[0] === 0xc3 && bytes[1] === 1 ? [10, 0] : bytes[0] === 0 ? [5, 0] : [0];
  let why = null;
  for (const start of starts) {
    const reader = new Reader(bytes);
    try {
      reader.take(start);
      const found = schema.read(reader);
      if (reader.at === bytes.length) return found;
      why = why || new Error("bytes are left after the value: it was written with another schema");
    } catch (error) { why = why || error; }
  }
  throw why;
}
