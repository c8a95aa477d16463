// Consume a topic as a share group, acknowledge each record, and print records per second.
// Run: java -cp 'jars/*' ShareWorker.java localhost:9092 topic group records

import java.time.Duration;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;

public class ShareWorker {
    public static void main(String[] words) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", words[0]);
        settings.put("group.id", words[2]);
        settings.put("share.acknowledgement.mode", "explicit");
        settings.put("key.deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer");
        settings.put("value.deserializer", "org.apache.kafka.common.serialization.ByteArrayDeserializer");
        long records = Long.parseLong(words[3]);
        long done = 0;
        long begun = 0;
        long first = 0;
        try (KafkaShareConsumer<byte[], byte[]> consumer = new KafkaShareConsumer<>(settings)) {
            consumer.subscribe(List.of(words[1]));
            while (done < records) {
                ConsumerRecords<byte[], byte[]> found = consumer.poll(Duration.ofSeconds(10));
                for (ConsumerRecord<byte[], byte[]> record : found) {
                    consumer.acknowledge(record, AcknowledgeType.ACCEPT);
                }
                done += found.count();
                if (begun == 0 && done > 0) {
                    begun = System.nanoTime();
                    first = done;
                }
            }
            System.out.println((done - first) * 1e9 / (System.nanoTime() - begun));
        }
    }
}
