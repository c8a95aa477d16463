package main

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/segmentio/kafka-go"
)

type segment struct{ address string }

func (peer segment) write(topic, codec string, count int) {
	codecs := map[string]kafka.Compression{"gzip": kafka.Gzip, "snappy": kafka.Snappy, "lz4": kafka.Lz4, "zstd": kafka.Zstd}
	writer := &kafka.Writer{
		Addr: kafka.TCP(peer.address), Topic: topic, RequiredAcks: kafka.RequireAll, AllowAutoTopicCreation: true,
		Compression: codecs[codec], BatchSize: count, BatchTimeout: 10 * time.Millisecond, MaxAttempts: 100, // a broker may be away
		Balancer: kafka.BalancerFunc(func(_ kafka.Message, partitions ...int) int { return partitions[0] }),
	}
	messages := []kafka.Message{}
	for number := range count {
		message := kafka.Message{Key: key(number), Value: value(number), Time: time.UnixMilli(timeMs + int64(number))}
		for _, one := range headers(number) {
			message.Headers = append(message.Headers, kafka.Header{Key: one.name, Value: one.value})
		}
		messages = append(messages, message)
	}
	must(writer.WriteMessages(context.Background(), messages...))
	must(writer.Close())
}

func (segment) transact(string, int) { must(errors.New("it has no transactions")) }

func (peer segment) reader(topics []string, group string) *kafka.Reader {
	return kafka.NewReader(kafka.ReaderConfig{
		Brokers: []string{peer.address}, GroupID: group, GroupTopics: topics, StartOffset: kafka.FirstOffset, SessionTimeout: 10 * time.Second,
		IsolationLevel: kafka.ReadCommitted, MaxWait: 500 * time.Millisecond,
	})
}

func (peer segment) take(ctx context.Context, reader *kafka.Reader) error {
	message, err := reader.FetchMessage(ctx)
	if err != nil {
		return err
	}
	found := []header{}
	for _, one := range message.Headers {
		found = append(found, header{one.Key, one.Value})
	}
	sayRecord(message.Topic, int32(message.Partition), message.Offset, message.Key, message.Value, found, message.Time.UnixMilli())
	return reader.CommitMessages(ctx, message)
}

func (peer segment) read(topics []string, group string, count int) {
	reader := peer.reader(topics, group)
	for range count {
		must(peer.take(context.Background(), reader))
	}
	must(reader.Close())
}

// Its readers tell nobody what they were assigned.
func (peer segment) member(topic, group, _ string, ended <-chan struct{}) {
	reader := peer.reader([]string{topic}, group)
	ctx, done := context.WithCancel(context.Background())
	go func() {
		<-ended
		done()
	}()
	for ctx.Err() == nil {
		_ = peer.take(ctx, reader)
	}
	must(reader.Close())
}

func (peer segment) admin(topic string) {
	client, ctx := &kafka.Client{Addr: kafka.TCP(peer.address), Transport: &kafka.Transport{}}, context.Background()
	// a transport shows for seconds what it remembers of topics; a shorter MetadataTTL would also be all the time that its own
	// request may take, and a broker that is slower is "not available"
	look := func(topics ...string) *kafka.MetadataResponse {
		transport := &kafka.Transport{}
		defer transport.CloseIdleConnections()
		found, err := (&kafka.Client{Addr: client.Addr, Transport: transport}).Metadata(ctx, &kafka.MetadataRequest{Topics: topics})
		must(err)
		return found
	}
	size := func() int {
		return len(look(topic).Topics[0].Partitions)
	}
	listed := func() bool {
		found := look()
		for _, one := range found.Topics {
			if one.Name == topic {
				return true
			}
		}
		return false
	}
	made, err := client.CreateTopics(ctx, &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{{
		Topic: topic, NumPartitions: 3, ReplicationFactor: 1, ConfigEntries: []kafka.ConfigEntry{{ConfigName: "retention.ms", ConfigValue: retention}},
	}}})
	must(err)
	must(made.Errors[topic])
	configs, err := client.DescribeConfigs(ctx, &kafka.DescribeConfigsRequest{Resources: []kafka.DescribeConfigRequestResource{{
		ResourceType: kafka.ResourceTypeTopic, ResourceName: topic, ConfigNames: []string{"retention.ms"},
	}}})
	must(err)
	say("created", size(), configs.Resources[0].ConfigEntries[0].ConfigValue)
	grown, err := client.CreatePartitions(ctx, &kafka.CreatePartitionsRequest{Topics: []kafka.TopicPartitionsConfig{{Name: topic, Count: 5}}})
	must(err)
	must(grown.Errors[topic])
	time.Sleep(100 * time.Millisecond)
	say("grown", size())
	pause()
	say("listed", listed())
	_, err = client.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{topic}})
	for errors.Is(err, io.ErrUnexpectedEOF) { // the connection had ended: it tells its application, which asks again
		_, err = client.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{topic}})
	}
	must(err)
	time.Sleep(100 * time.Millisecond)
	say("deleted", !listed())
}
