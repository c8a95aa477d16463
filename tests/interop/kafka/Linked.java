// Fills and reads topics of Apache Kafka with its own client: java Linked.java ADDRESS COMMAND TOPIC [ARGUMENT]
// `read` prints each committed record as JSON, and then the end offset of each partition.
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.TreeMap;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class Linked {
    static final int PARTITIONS = 3;
    static String address;
    static final Random chance = new Random(7);

    public static void main(String[] words) throws Exception {
        address = words[0];
        String topic = words[2];
        switch (words[1]) {
            case "create" -> create(topic, words.length > 3 ? words[3] : "");
            case "delete" -> delete(topic);
            case "codec" -> fill(topic, words[3], Integer.parseInt(words[4]));
            case "transactions" -> transactions(topic, Integer.parseInt(words[3]));
            case "compacted" -> compacted(topic);
            case "trim" -> trim(topic, Long.parseLong(words[3]));
            case "read" -> read(topic);
            default -> throw new IllegalArgumentException(words[1]);
        }
    }

    static void create(String topic, String settings) throws Exception {
        Map<String, String> config = new HashMap<>();
        for (String setting : settings.split(",")) {
            if (!setting.isEmpty()) {
                config.put(setting.split("=")[0], setting.split("=")[1]);
            }
        }
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", address))) {
            admin.createTopics(List.of(new NewTopic(topic, PARTITIONS, (short) 1).configs(config))).all().get();
        }
    }

    static void delete(String topic) throws Exception {
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", address))) {
            admin.deleteTopics(List.of(topic)).all().get();
            while (admin.listTopics().names().get().contains(topic)) {
                Thread.sleep(100);
            }
        }
    }

    static void trim(String topic, long offset) throws Exception {
        Map<TopicPartition, RecordsToDelete> trimmed = new HashMap<>();
        for (int partition = 0; partition < PARTITIONS; partition++) {
            trimmed.put(new TopicPartition(topic, partition), RecordsToDelete.beforeOffset(offset));
        }
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", address))) {
            admin.deleteRecords(trimmed).all().get();
        }
    }

    static KafkaProducer<byte[], byte[]> producer(Map<String, Object> more) {
        Map<String, Object> config = new HashMap<>(more);
        config.put("bootstrap.servers", address);
        config.put("linger.ms", 2);
        return new KafkaProducer<>(config, new ByteArraySerializer(), new ByteArraySerializer());
    }

    static ProducerRecord<byte[], byte[]> record(String topic, int number) {
        byte[] key = number % 7 == 0 ? null : number % 7 == 1 ? new byte[0] : ("key-" + number % 100).getBytes();
        byte[] value = number % 11 == 0 ? null : number % 11 == 1 ? new byte[0] : new byte[chance.nextInt(300)];
        if (value != null) {
            chance.nextBytes(value);
        }
        var record = new ProducerRecord<>(topic, number % PARTITIONS, 1_700_000_000_000L + number, key, value);
        if (number % 3 == 0) {
            record.headers().add("a", ("x" + number).getBytes()).add("b", null).add("", new byte[0]);
        }
        return record;
    }

    static void fill(String topic, String codec, int count) {
        try (var producer = producer(Map.of("compression.type", codec))) {
            for (int number = 0; number < count; number++) {
                producer.send(record(topic, number));
            }
        }
    }

    // Several producers, whose transactions overlap; every second one aborts
    static void transactions(String topic, int count) {
        List<KafkaProducer<byte[], byte[]>> producers = new ArrayList<>();
        for (int which = 0; which < 4; which++) {
            producers.add(producer(which == 3 ? Map.of() : Map.of("transactional.id", topic + which)));
            if (which < 3) {
                producers.get(which).initTransactions();
                producers.get(which).beginTransaction();
            }
        }
        for (int number = 0; number < count; number++) {
            int which = chance.nextInt(4);
            producers.get(which).send(record(topic, number));
            if (which < 3 && chance.nextInt(10) == 0) {
                end(producers.get(which), chance.nextBoolean());
                producers.get(which).beginTransaction();
            }
        }
        for (int which = 0; which < 4; which++) {
            if (which < 3) {
                end(producers.get(which), which == 1);
            }
            producers.get(which).close();
        }
    }

    static void end(KafkaProducer<byte[], byte[]> producer, boolean aborts) {
        producer.flush();
        if (aborts) {
            producer.abortTransaction();
        } else {
            producer.commitTransaction();
        }
    }

    // Fill until the cleaner has removed records
    static void compacted(String topic) throws Exception {
        int number = 0;
        long end = System.currentTimeMillis() + 90_000;
        try (var producer = producer(Map.of("compression.type", "zstd"))) {
            while (System.currentTimeMillis() < end) {
                for (int i = 0; i < 500; i++) {
                    byte[] key = ("key-" + number % 200).getBytes();
                    producer.send(new ProducerRecord<>(topic, number % PARTITIONS, key, ("value-" + number).getBytes()));
                    number++;
                }
                producer.flush();
                Thread.sleep(500);
                if (number > 3_000 && rows(topic, new TreeMap<>()).size() < number - 1_000) {
                    return;
                }
            }
        }
        throw new IllegalStateException("nothing was compacted");
    }

    static List<ConsumerRecord<byte[], byte[]>> rows(String topic, Map<Integer, Long> ends) {
        Map<String, Object> config = Map.of(
            "bootstrap.servers", address, "isolation.level", "read_committed", "enable.auto.commit", false,
            "auto.offset.reset", "none");
        List<ConsumerRecord<byte[], byte[]>> found = new ArrayList<>();
        try (var consumer = new KafkaConsumer<>(config, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            List<TopicPartition> partitions = new ArrayList<>();
            for (int partition = 0; partition < PARTITIONS; partition++) {
                partitions.add(new TopicPartition(topic, partition));
            }
            consumer.assign(partitions);
            consumer.seekToBeginning(partitions);
            Map<TopicPartition, Long> stops = consumer.endOffsets(partitions);
            stops.forEach((partition, offset) -> ends.put(partition.partition(), offset));
            while (partitions.stream().anyMatch(one -> consumer.position(one) < stops.get(one))) {
                consumer.poll(Duration.ofMillis(200)).forEach(found::add);
            }
        }
        return found;
    }

    static void read(String topic) {
        Map<Integer, Long> ends = new TreeMap<>();
        StringBuilder text = new StringBuilder();
        for (var record : rows(topic, ends)) {
            List<String> headers = new ArrayList<>();
            for (Header header : record.headers()) {
                headers.add("[" + text(header.key().getBytes(StandardCharsets.UTF_8)) + "," + text(header.value()) + "]");
            }
            text.append("[").append(record.partition()).append(",").append(record.offset()).append(",")
                .append(text(record.key())).append(",").append(text(record.value())).append(",[")
                .append(String.join(",", headers)).append("],").append(record.timestamp()).append("]\n");
        }
        System.out.print(text);
        System.out.println(ends.values());
    }

    static String text(byte[] bytes) {
        return bytes == null ? "null" : "\"" + Base64.getEncoder().encodeToString(bytes) + "\"";
    }
}
