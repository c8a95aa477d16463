// Drives Kafka's own client, as transactions.driver drives those in Python, with the same arguments and output:
//   copy ADDRESS SOURCE TARGET NAME LIFE PARTITIONS
//   read ADDRESS TOPIC PARTITIONS
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class Transactions {
    static final int ABORTED = 5;
    static final int TAKEN = 200;
    static final Duration POLL = Duration.ofMillis(300);
    static volatile boolean stop;
    static int attempt; // each has its own values, also after an error

    public static void main(String[] words) throws Exception {
        Thread end = new Thread(() -> {
            try {
                System.in.readAllBytes();
            } catch (java.io.IOException error) {
                // ends, too
            }
            stop = true;
        });
        end.setDaemon(true);
        end.start();
        if (words[0].equals("copy")) {
            copy(words[1], words[2], words[3], words[4], words[5], Integer.parseInt(words[6]));
        } else {
            read(words[1], words[2], Integer.parseInt(words[3]));
        }
        System.exit(0);
    }

    static void say(String event, String rest) {
        System.out.println("[\"" + event + "\", " + rest + "]");
        System.out.flush();
    }

    static long now() {
        return System.nanoTime();
    }

    static Properties settings(String address) {
        Properties found = new Properties();
        found.put("bootstrap.servers", address);
        found.put("reconnect.backoff.max.ms", "500");
        found.put("request.timeout.ms", "10000");
        found.put("default.api.timeout.ms", "30000");
        return found;
    }

    static KafkaConsumer<byte[], byte[]> consumer(String address, String group) {
        Properties found = settings(address);
        if (group != null) {
            found.put("group.id", group);
        }
        found.put("isolation.level", "read_committed");
        found.put("auto.offset.reset", "earliest");
        found.put("enable.auto.commit", "false");
        found.put("max.poll.records", String.valueOf(TAKEN));
        return new KafkaConsumer<>(found, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    static KafkaProducer<byte[], byte[]> producer(String address, String name) {
        Properties found = settings(address);
        found.remove("default.api.timeout.ms");
        found.put("transactional.id", name);
        found.put("max.block.ms", "30000");
        found.put("delivery.timeout.ms", "30000");
        return new KafkaProducer<>(found, new ByteArraySerializer(), new ByteArraySerializer());
    }

    static List<TopicPartition> places(String topic, int partitions) {
        List<TopicPartition> found = new ArrayList<>();
        for (int number = 0; number < partitions; number++) {
            found.add(new TopicPartition(topic, number));
        }
        return found;
    }

    /** Seeks to the group's offsets and returns them, by partition. */
    static Map<Integer, Long> seek(KafkaConsumer<byte[], byte[]> reading, List<TopicPartition> places) {
        Map<Integer, Long> found = new TreeMap<>();
        Map<TopicPartition, OffsetAndMetadata> committed = reading.committed(new java.util.HashSet<>(places));
        for (TopicPartition place : places) {
            OffsetAndMetadata at = committed.get(place);
            found.put(place.partition(), at == null ? 0 : at.offset());
            reading.seek(place, found.get(place.partition()));
        }
        return found;
    }

    static void copy(String address, String source, String target, String name, String life, int partitions) throws InterruptedException {
        while (!stop) {
            KafkaProducer<byte[], byte[]> writing = null;
            KafkaConsumer<byte[], byte[]> reading = null;
            try {
                writing = producer(address, name);
                writing.initTransactions();
                reading = consumer(address, name);
                List<TopicPartition> places = places(source, partitions);
                reading.assign(places);
                long begun = now();
                List<String> pairs = new ArrayList<>();
                seek(reading, places).forEach((number, at) -> pairs.add("[" + number + ", " + at + "]"));
                say("positions", begun + ", " + now() + ", " + pairs);
                while (!stop) {
                    transact(writing, reading, places, target, name, life);
                }
            } catch (KafkaException error) {
                say("error", "\"" + error.getClass().getSimpleName() + "\"");
                Thread.sleep(200);
            }
            if (writing != null) {
                writing.close(Duration.ofSeconds(1));
            }
            if (reading != null) {
                reading.close(Duration.ofSeconds(1));
            }
        }
    }

    /** Copies some records in a transaction, if there are any. */
    static void transact(KafkaProducer<byte[], byte[]> writing, KafkaConsumer<byte[], byte[]> reading, List<TopicPartition> places,
            String target, String name, String life) {
        List<ConsumerRecord<byte[], byte[]>> taken = new ArrayList<>();
        reading.poll(POLL).forEach(taken::add);
        if (taken.isEmpty()) {
            say("idle", String.valueOf(now()));
            return;
        }
        attempt++;
        String prefix = name + ":" + life + "." + attempt;
        List<String> pairs = new ArrayList<>();
        Map<TopicPartition, OffsetAndMetadata> after = new HashMap<>();
        for (ConsumerRecord<byte[], byte[]> record : taken) {
            pairs.add("[" + record.partition() + ", " + record.offset() + "]");
            after.put(new TopicPartition(record.topic(), record.partition()), new OffsetAndMetadata(record.offset() + 1));
        }
        say("begun", now() + ", \"" + prefix + "\", " + pairs);
        writing.beginTransaction();
        for (ConsumerRecord<byte[], byte[]> record : taken) {
            byte[] value = (prefix + ":" + record.partition() + ":" + record.offset()).getBytes(StandardCharsets.UTF_8);
            writing.send(new ProducerRecord<>(target, (record.partition() + 1) % places.size(), null, value));
        }
        writing.sendOffsetsToTransaction(after, reading.groupMetadata());
        boolean commits = attempt % ABORTED != 0;
        if (commits) {
            say("ending", String.valueOf(now()));
            writing.commitTransaction();
        } else {
            writing.abortTransaction();
        }
        say("ended", String.valueOf(now()));
        if (!commits) {
            seek(reading, places);
        }
    }

    static void read(String address, String topic, int partitions) {
        KafkaConsumer<byte[], byte[]> reading = consumer(address, null);
        reading.assign(places(topic, partitions));
        reading.seekToBeginning(places(topic, partitions));
        long[] following = new long[partitions];
        while (!stop) {
            long begun = now();
            Map<Integer, List<ConsumerRecord<byte[], byte[]>>> found = new TreeMap<>();
            for (ConsumerRecord<byte[], byte[]> record : reading.poll(POLL)) {
                found.computeIfAbsent(record.partition(), number -> new ArrayList<>()).add(record);
            }
            for (int partition : new TreeSet<>(found.keySet())) {
                List<String> offsets = new ArrayList<>();
                List<String> values = new ArrayList<>();
                for (ConsumerRecord<byte[], byte[]> record : found.get(partition)) {
                    offsets.add(String.valueOf(record.offset()));
                    values.add("\"" + new String(record.value(), StandardCharsets.UTF_8) + "\"");
                }
                say("read", begun + ", " + now() + ", " + partition + ", " + following[partition] + ", " + offsets + ", " + values);
                following[partition] = Long.parseLong(offsets.get(offsets.size() - 1)) + 1;
            }
            say("idle", String.valueOf(now()));
        }
    }
}
