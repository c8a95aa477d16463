// Java's share consumer from the join of a member to a record that is delivered too often: prints what it sees, one line a step.
// Usage: java Share.java BOOTSTRAP TOPIC

import java.time.Duration;
import java.util.*;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.*;

public class Share {
    static final String GROUP = "share-" + System.nanoTime();
    static String bootstrap, topic;

    public static void main(String[] arguments) throws Exception {
        bootstrap = arguments[0];
        topic = arguments[1];
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", bootstrap))) {
            admin.createTopics(List.of(new NewTopic(topic, 1, (short) 1))).all().get();
            configure(admin, "share.auto.offset.reset", "earliest");
            configure(admin, "share.record.lock.duration.ms", "15000");
            explicitly();
            implicitly();
            late();
            configure(admin, "share.delivery.count.limit", "2");
            Thread.sleep(1000);
            often();
            TopicPartition partition = new TopicPartition(topic, 0);
            var listed = admin.listShareGroupOffsets(Map.of(GROUP, new ListShareGroupOffsetsSpec())).partitionsToOffsetInfo(GROUP).get();
            System.out.println("start " + (listed.get(partition).startOffset() >= 10));
            System.out.println("state " + admin.describeShareGroups(List.of(GROUP)).all().get().get(GROUP).groupState());
            admin.alterShareGroupOffsets(GROUP, Map.of(partition, 3L)).all().get();
            try (ShareConsumer<String, String> consumer = consumer("explicit")) {
                System.out.println("altered " + poll(consumer, 1).get(0).offset());
            }
            admin.deleteShareGroups(List.of(GROUP)).all().get();
            System.out.println("listed " + admin.listGroups(ListGroupsOptions.forShareGroups()).all().get().stream()
                .filter(group -> group.groupId().equals(GROUP)).count());
        }
    }

    static void configure(Admin admin, String name, String value) throws Exception {
        AlterConfigOp change = new AlterConfigOp(new ConfigEntry(name, value), AlterConfigOp.OpType.SET);
        admin.incrementalAlterConfigs(Map.of(new ConfigResource(ConfigResource.Type.GROUP, GROUP), List.of(change))).all().get();
    }

    static void produce(int count) throws Exception {
        try (Producer<String, String> producer = new KafkaProducer<>(Map.of("bootstrap.servers", bootstrap), new StringSerializer(), new StringSerializer())) {
            for (int number = 0; number < count; number++) producer.send(new ProducerRecord<>(topic, "v" + number)).get();
        }
    }

    static ShareConsumer<String, String> consumer(String mode) {
        ShareConsumer<String, String> consumer = new KafkaShareConsumer<>(
            Map.of("bootstrap.servers", bootstrap, "group.id", GROUP, "share.acknowledgement.mode", mode),
            new StringDeserializer(), new StringDeserializer());
        consumer.subscribe(List.of(topic));
        return consumer;
    }

    // Polls until there are records; one more poll would acknowledge them.
    static List<ConsumerRecord<String, String>> poll(ShareConsumer<String, String> consumer, int count) {
        List<ConsumerRecord<String, String>> found = new ArrayList<>();
        long end = System.currentTimeMillis() + 30_000;
        while (found.size() < count && System.currentTimeMillis() < end)
            for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(500))) found.add(record);
        return found;
    }

    static String shown(List<ConsumerRecord<String, String>> records) {
        return records.stream().map(record -> record.offset() + "x" + record.deliveryCount().get()).collect(Collectors.joining(" "));
    }

    static String committed(ShareConsumer<String, String> consumer) {
        return consumer.commitSync(Duration.ofSeconds(20)).values().stream()
            .map(error -> error.map(one -> one.getClass().getSimpleName()).orElse("ok")).sorted().collect(Collectors.joining(" "));
    }

    static void explicitly() throws Exception {
        produce(6);
        try (ShareConsumer<String, String> consumer = consumer("explicit")) {
            List<ConsumerRecord<String, String>> records = poll(consumer, 6);
            System.out.println("explicit " + shown(records));
            AcknowledgeType[] types = {AcknowledgeType.ACCEPT, AcknowledgeType.RELEASE, AcknowledgeType.REJECT};
            for (ConsumerRecord<String, String> record : records) consumer.acknowledge(record, types[(int) record.offset() % 3]);
            System.out.println("committed " + committed(consumer));
            records = poll(consumer, 2);
            System.out.println("again " + shown(records));
            for (ConsumerRecord<String, String> record : records) consumer.acknowledge(record, AcknowledgeType.RENEW);
            System.out.println("renewed " + committed(consumer));
            records = poll(consumer, 2);
            System.out.println("returned " + shown(records));
            for (ConsumerRecord<String, String> record : records) consumer.acknowledge(record, AcknowledgeType.ACCEPT);
            System.out.println("accepted " + committed(consumer));
            produce(3);
            System.out.println("unfinished " + shown(poll(consumer, 3)));
        }
    }

    static void implicitly() {
        try (ShareConsumer<String, String> consumer = consumer("implicit")) {
            System.out.println("implicit " + shown(poll(consumer, 3)));
            System.out.println("all " + committed(consumer));
        }
    }

    static void late() throws Exception {
        produce(1);
        try (ShareConsumer<String, String> slow = consumer("explicit"); ShareConsumer<String, String> other = consumer("explicit")) {
            List<ConsumerRecord<String, String>> records = poll(slow, 1);
            System.out.println("held " + shown(records));
            List<ConsumerRecord<String, String>> again = poll(other, 1);
            System.out.println("expired " + shown(again));
            for (ConsumerRecord<String, String> record : records) slow.acknowledge(record);
            System.out.println("late " + committed(slow));
            for (ConsumerRecord<String, String> record : again) other.acknowledge(record);
            System.out.println("in time " + committed(other));
        }
    }

    static void often() throws Exception {
        produce(1);
        try (ShareConsumer<String, String> consumer = consumer("explicit")) {
            for (int attempt = 0; attempt < 2; attempt++) {
                List<ConsumerRecord<String, String>> records = poll(consumer, 1);
                System.out.println("often " + shown(records));
                for (ConsumerRecord<String, String> record : records) consumer.acknowledge(record, AcknowledgeType.RELEASE);
                consumer.commitSync(Duration.ofSeconds(20));
            }
            System.out.println("never " + consumer.poll(Duration.ofSeconds(3)).count());
        }
    }
}
