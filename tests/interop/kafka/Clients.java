// Drives the Java client. See README.md.
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.CommitFailedException;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.RebalanceInProgressException;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

public class Clients {
    static final long TIME_MS = 1_700_000_000_000L;
    static final String RETENTION = "7200000";

    public static void main(String[] words) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", words[2]);
        if (words[0].endsWith("+consumer")) settings.put("group.protocol", "consumer");
        switch (words[1]) {
            case "write" -> { for (String codec : words[4].split(",")) write(settings, words[3], codec, Integer.parseInt(words[5])); }
            case "transact" -> transact(settings, words[3], words[4], Integer.parseInt(words[5]));
            case "read" -> read(settings, Arrays.asList(words[3].split(",")), words[4], Integer.parseInt(words[5]));
            case "member" -> member(settings, words[3], words[4], words[5]);
            case "admin" -> admin(settings, words[3]);
            default -> throw new IllegalArgumentException(words[1]);
        }
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static byte[] value(int number) {
        if (number % 50 == 49) return bytes("x".repeat(100_000));
        byte[] all = new byte[256];
        for (int at = 0; at < 256; at++) all[at] = (byte) at;
        return new byte[][] {null, {}, bytes(("v" + number).repeat(20)), all}[number % 4];
    }

    static String text(byte[] data) {
        if (data == null) return "null";
        StringBuilder found = new StringBuilder("\"");
        for (byte one : data) found.append(Character.forDigit(one >> 4 & 15, 16)).append(Character.forDigit(one & 15, 16));
        return found.append('"').toString();
    }

    static synchronized void say(String line) {
        System.out.println(line);
        System.out.flush();
    }

    static void say(ConsumerRecord<byte[], byte[]> got) {
        List<String> headers = new ArrayList<>();
        for (Header header : got.headers()) headers.add("[\"" + header.key() + "\"," + text(header.value()) + "]");
        say("[\"record\",\"" + got.topic() + "\"," + got.partition() + "," + got.offset() + "," + text(got.key()) + ","
            + text(got.value()) + ",[" + String.join(",", headers) + "]," + got.timestamp() + "]");
    }

    static void write(Properties settings, String prefix, String codec, int count) throws Exception {
        settings.put("compression.type", codec);
        try (var producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            List<Future<?>> sent = new ArrayList<>();
            for (int number = 0; number < count; number++) {
                var record = new ProducerRecord<>(prefix + "." + codec, 0, TIME_MS + number, bytes("k" + number), value(number));
                record.headers().add("h", bytes("1")).add("h", new byte[0]).add("n" + number, new byte[1]);
                sent.add(producer.send(record));
            }
            for (Future<?> one : sent) one.get();
        }
    }

    static void transact(Properties settings, String topic, String codec, int count) throws Exception {
        settings.put("compression.type", codec);
        settings.put("transactional.id", "java-" + topic);
        try (var producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            producer.initTransactions();
            for (int number = 0; number < count; number++) {
                producer.beginTransaction();
                for (int partition = 0; partition < 3; partition++)
                    producer.send(new ProducerRecord<>(topic, partition, null, bytes("" + number)));
                var moved = Map.of(new TopicPartition(topic, 0), new OffsetAndMetadata(number));
                producer.sendOffsetsToTransaction(moved, new ConsumerGroupMetadata(topic));
                if (number % 3 == 2) producer.abortTransaction();
                else producer.commitTransaction();
            }
        }
    }

    static KafkaConsumer<byte[], byte[]> consumer(Properties settings, String group) {
        settings.put("group.id", group);
        settings.put("auto.offset.reset", "earliest");
        settings.put("isolation.level", "read_committed");
        return new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    static void read(Properties settings, List<String> topics, String group, int count) {
        try (var consumer = consumer(settings, group)) {
            consumer.subscribe(topics);
            while (count > 0) {
                for (var got : consumer.poll(Duration.ofMillis(500))) {
                    say(got);
                    count--;
                }
            }
            consumer.commitSync();
        }
    }

    static void member(Properties settings, String topic, String group, String instance) throws Exception {
        if (!instance.isEmpty()) settings.put("group.instance.id", instance);
        settings.put("enable.auto.commit", "false");
        if (!"consumer".equals(settings.get("group.protocol"))) settings.put("session.timeout.ms", "10000");
        Thread end = new Thread(() -> {
            try { while (System.in.read() >= 0) { } } catch (java.io.IOException closed) { }
        });
        end.start();
        try (var consumer = consumer(settings, group)) {
            consumer.subscribe(List.of(topic.split(",")), new ConsumerRebalanceListener() {
                public void onPartitionsRevoked(Collection<TopicPartition> revoked) {
                    shown(revoked);
                }

                public void onPartitionsAssigned(Collection<TopicPartition> added) {
                    shown(List.of());
                }

                void shown(Collection<TopicPartition> without) {
                    var held = consumer.assignment().stream().filter(one -> !without.contains(one));
                    say("[\"assigned\"," + held.map(TopicPartition::partition).sorted().toList() + "]");
                }
            });
            while (end.isAlive()) {
                var found = consumer.poll(Duration.ofMillis(200));
                for (var got : found) say(got);
                try {
                    if (!found.isEmpty()) consumer.commitSync();
                } catch (CommitFailedException | RebalanceInProgressException gone) {
                    // no member any more: it joins again, and commits the next time
                }
            }
        }
    }

    static int size(Admin admin, String topic) throws Exception {
        return admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic).partitions().size();
    }

    static void admin(Properties settings, String topic) throws Exception {
        try (Admin admin = Admin.create(settings)) {
            admin.createTopics(List.of(new NewTopic(topic, 3, (short) 1).configs(Map.of("retention.ms", RETENTION)))).all().get();
            ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
            String kept = admin.describeConfigs(List.of(resource)).all().get().get(resource).get("retention.ms").value();
            say("[\"created\"," + size(admin, topic) + ",\"" + kept + "\"]");
            admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(5))).all().get();
            say("[\"grown\"," + size(admin, topic) + "]");
            System.in.read();
            say("[\"listed\"," + admin.listTopics().names().get().contains(topic) + "]");
            admin.deleteTopics(List.of(topic)).all().get();
            say("[\"deleted\"," + !admin.listTopics().names().get().contains(topic) + "]");
        }
    }
}
