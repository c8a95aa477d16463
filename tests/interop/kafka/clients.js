// Drives KafkaJS, with NODE_PATH naming where it is. See README.md.
const { CompressionCodecs, CompressionTypes, Kafka, logLevel } = require("kafkajs");

const TIME_MS = 1700000000000;
const RETENTION = "7200000";
const say = (...words) => process.stdout.write(JSON.stringify(words) + "\n");
const text = (data) => (data === null || data === undefined ? null : Buffer.from(data).toString("hex"));
CompressionCodecs[CompressionTypes.Snappy] = require("kafkajs-snappy");
const pause = (ms) => new Promise((done) => setTimeout(done, ms));


function value(number) {
  if (number % 50 === 49) return Buffer.alloc(100000, "x");
  return [null, Buffer.alloc(0), Buffer.from(`v${number}`.repeat(20)), Buffer.from([...Array(256).keys()])][number % 4];
}

function record(number) {
  const headers = { h: [Buffer.from("1"), Buffer.alloc(0)], [`n${number}`]: Buffer.from([0]) };
  return { key: `k${number}`, value: value(number), headers, partition: 0, timestamp: String(TIME_MS + number) };
}

function sayRecord({ topic, partition, message }) {
  const headers = Object.entries(message.headers || {}).flatMap(([name, found]) => [found].flat().map((one) => [name, text(one)]));
  say("record", topic, partition, Number(message.offset), text(message.key), text(message.value), headers, Number(message.timestamp));
}

async function write(kafka, prefix, codecs, count) {
  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 });
  await producer.connect();
  for (const codec of codecs.split(",")) {
    const compression = CompressionTypes[{ none: "None", gzip: "GZIP", snappy: "Snappy" }[codec]];
    for (let from = 0; from < Number(count); from += 100) {
      const messages = Array.from({ length: Math.min(100, Number(count) - from) }, (_, number) => record(from + number));
      await producer.send({ topic: `${prefix}.${codec}`, messages, compression });
    }
  }
  await producer.disconnect();
}

async function transactOne(producer, topic, number) {
  const transaction = await producer.transaction();
  const messages = [0, 1, 2].map((partition) => ({ value: `${number}`, partition }));
  await transaction.send({ topic, messages, compression: CompressionTypes.GZIP });
  await transaction.sendOffsets({ consumerGroupId: topic, topics: [{ topic, partitions: [{ partition: 0, offset: `${number}` }] }] });
  await (number % 3 === 2 ? transaction.abort() : transaction.commit());
}

async function transacting(kafka, topic) {
  const producer = kafka.producer({ transactionalId: `kafkajs-${topic}`, idempotent: true, maxInFlightRequests: 1 });
  await producer.connect();
  return producer;
}

async function committed(kafka, topic) {
  const admin = kafka.admin();
  await admin.connect();
  const [found] = await admin.fetchOffsets({ groupId: topic, topics: [topic] });
  await admin.disconnect();
  return Math.max(...found.partitions.map(({ offset }) => Number(offset)));
}

// KafkaJS sends no part of a transaction again when its connection is lost, so its application does, whatever the error says: the position
// that was committed with the records says how far it has come, once a new producer has ended what the one before left open.
async function transact(kafka, topic, codec, count) {
  let failuresLeft = 3;
  let producer = await transacting(kafka, topic);
  for (let number = 0; number < Number(count); number++) {
    try {
      await transactOne(producer, topic, number);
    } catch (error) {
      if (--failuresLeft < 0) throw error;
      await producer.disconnect();
      producer = await transacting(kafka, topic);
      await transactOne(producer, topic, 2);
      if (number % 3 !== 2 && (await committed(kafka, topic)) < number) number--;
    }
  }
  await producer.disconnect();
}

async function read(kafka, topics, groupId, count) {
  const consumer = kafka.consumer({ groupId, maxBytesPerPartition: 4194304 });
  await consumer.connect();
  await consumer.subscribe({ topics: topics.split(","), fromBeginning: true });
  let left = Number(count);
  await new Promise((done) => {
    consumer.run({ eachMessage: async (got) => (sayRecord(got), --left === 0 && done()) });
  });
  await consumer.disconnect();
}

async function member(kafka, topic, groupId) {
  const consumer = kafka.consumer({ groupId, sessionTimeout: 10000, heartbeatInterval: 500, maxWaitTimeInMs: 500 });
  const ended = new Promise((done) => process.stdin.on("end", done).resume());
  consumer.on(consumer.events.GROUP_JOIN, ({ payload }) => say("assigned", payload.memberAssignment[topic] || []));
  await consumer.connect();
  await consumer.subscribe({ topics: [topic], fromBeginning: true });
  await consumer.run({ autoCommitThreshold: 1, eachMessage: async (got) => sayRecord(got) });
  await ended;
  await consumer.disconnect();
}

async function admin(kafka, topic) {
  const admin = kafka.admin();
  await admin.connect();
  const size = async () => (await admin.fetchTopicMetadata({ topics: [topic] })).topics[0].partitions.length;
  await admin.createTopics({ topics: [{ topic, numPartitions: 3, configEntries: [{ name: "retention.ms", value: RETENTION }] }] });
  const found = await admin.describeConfigs({ resources: [{ type: 2, name: topic, configNames: ["retention.ms"] }], includeSynonyms: false });
  say("created", await size(), found.resources[0].configEntries[0].configValue);
  await admin.createPartitions({ topicPartitions: [{ topic, count: 5 }] });
  say("grown", await size());
  await new Promise((go) => process.stdin.once("data", go).once("end", go));
  say("listed", (await admin.listTopics()).includes(topic));
  await admin.deleteTopics({ topics: [topic] });
  await pause(100);
  say("deleted", !(await admin.listTopics()).includes(topic));
  await admin.disconnect();
}

const [, verb, address, ...words] = process.argv.slice(2);
const kafka = new Kafka({ brokers: [address], logLevel: logLevel.ERROR, retry: { retries: 20, maxRetryTime: 2000 } });
const failed = (error) => (console.error(error), process.exit(1));
// ends by itself only where the broker was there all the time: after one that was away something goes on connecting
({ write, transact, read, member, admin })[verb](kafka, ...words).then(() => process.stdout.write("", () => process.exit(0)), failed);
