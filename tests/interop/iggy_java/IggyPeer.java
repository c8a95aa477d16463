// Drives the unmodified Java SDK as iggy_peer.py drives those of PyPI.
//
// usage: java -cp CLASSPATH IggyPeer.java HOST PORT ACTION STREAM...; one line of JSON per stream, and "done" at the end.

import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Optional;
import org.apache.iggy.client.blocking.tcp.IggyTcpClient;
import org.apache.iggy.consumergroup.Consumer;
import org.apache.iggy.identifier.ConsumerId;
import org.apache.iggy.identifier.StreamId;
import org.apache.iggy.identifier.TopicId;
import org.apache.iggy.message.Message;
import org.apache.iggy.message.Partitioning;
import org.apache.iggy.message.PolledMessages;
import org.apache.iggy.message.PollingStrategy;
import org.apache.iggy.topic.CompressionAlgorithm;

public class IggyPeer {
    static final int COUNT = 10_000;
    static final int BATCH = 1_000;
    static final TopicId TOPIC = TopicId.of("paid");
    static final Optional<Long> FIRST = Optional.of(0L);
    static final Consumer SINGLE = Consumer.of(9L);
    static IggyTcpClient client;

    static String payload(String stream, int number) {
        return stream + " " + number + " " + "é".repeat(number % 50);
    }

    static String text(Message message) {
        return new String(message.payload(), StandardCharsets.UTF_8);
    }

    static void check(boolean holds, String what) {
        if (!holds) {
            throw new IllegalStateException(what);
        }
    }

    static String write(String stream) {
        StreamId id = StreamId.of(stream);
        client.streams().createStream(stream);
        client.topics().createTopic(
                id, 3L, CompressionAlgorithm.None, BigInteger.ZERO, BigInteger.ZERO, Optional.empty(), "paid");
        for (int start = 0; start < COUNT; start += BATCH) {
            List<Message> messages = new ArrayList<>();
            for (int number = start; number < start + BATCH; number++) {
                messages.add(Message.of(payload(stream, number)));
            }
            client.messages().sendMessages(id, TOPIC, Partitioning.partitionId(0L), messages);
        }
        var found = client.streams().getStream(id).orElseThrow();
        return "\"topic\": \"paid\", \"messages\": " + found.messagesCount() + ", \"topics\": " + found.topicsCount();
    }

    static PolledMessages poll(String stream, Consumer consumer, PollingStrategy strategy, long count, boolean commit) {
        return client.messages().pollMessages(StreamId.of(stream), TOPIC, FIRST, consumer, strategy, count, commit);
    }

    static String read(String stream) {
        int number = 0;
        while (number < COUNT) {
            var strategy = PollingStrategy.offset(BigInteger.valueOf(number));
            PolledMessages polled = poll(stream, SINGLE, strategy, BATCH, false);
            check(!polled.messages().isEmpty(), "nothing at offset " + number);
            for (Message message : polled.messages()) {
                check(message.header().offset().intValue() == number, "another offset at " + number);
                check(text(message).equals(payload(stream, number)), "another payload at " + number);
                number++;
            }
        }
        return "\"read\": " + number;
    }

    static String commit(String stream) {
        List<String> nexts = new ArrayList<>();
        for (int round = 0; round < 3; round++) {
            PolledMessages polled = poll(stream, SINGLE, PollingStrategy.next(), 7, true);
            nexts.add(polled.messages().get(0).header().offset().toString());
        }
        return "\"nexts\": [" + String.join(", ", nexts) + "]";
    }

    static Consumer joined(String stream, String group) {
        ConsumerId id = ConsumerId.of(group);
        if (client.consumerGroups().getConsumerGroup(StreamId.of(stream), TOPIC, id).isEmpty()) {
            client.consumerGroups().createConsumerGroup(StreamId.of(stream), TOPIC, group);
        }
        client.consumerGroups().joinConsumerGroup(StreamId.of(stream), TOPIC, id);
        return Consumer.group(id);
    }

    static String group(String stream) {
        Consumer consumer = joined(stream, "group-of-java");
        int number = 0;
        while (number < COUNT) {
            for (Message message : poll(stream, consumer, PollingStrategy.next(), BATCH, true).messages()) {
                check(text(message).equals(payload(stream, number)), "another payload at " + number);
                number++;
            }
        }
        return "\"consumed\": " + number + ", \"stored\": true";
    }

    static String share(String stream) throws Exception {
        Consumer consumer = joined(stream, "shared");
        while (!isOver) {
            for (Message message : poll(stream, consumer, PollingStrategy.next(), BATCH, true).messages()) {
                System.out.println("{\"got\": \"" + text(message) + "\"}");
            }
            Thread.sleep(20);
        }
        return "\"over\": true";
    }

    static volatile boolean isOver;

    public static void main(String[] words) throws Exception {
        client = IggyTcpClient.builder()
                .host(words[0])
                .port(Integer.valueOf(words[1]))
                .credentials("iggy", "iggy")
                .connectionPoolSize(1)
                .buildAndLogin();
        Thread input = new Thread(() -> {
            try {
                System.in.readAllBytes();
            } catch (java.io.IOException error) {
                throw new java.io.UncheckedIOException(error);
            }
            isOver = true;
        });
        input.setDaemon(true);
        input.start();
        for (int at = 3; at < words.length; at++) {
            String result =
                    switch (words[2]) {
                        case "write" -> write(words[at]);
                        case "read" -> read(words[at]);
                        case "commit" -> commit(words[at]);
                        case "group" -> group(words[at]);
                        case "share" -> share(words[at]);
                        default -> throw new IllegalArgumentException(words[2]);
                    };
            System.out.println("{\"stream\": \"" + words[at] + "\", " + result + "}");
        }
        System.out.println("done");
        System.exit(0);
    }
}
