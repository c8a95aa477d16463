package main

import (
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/IBM/sarama"
)

type ibm struct {
	address string
	newest  bool
}

func (peer ibm) config() *sarama.Config {
	config := sarama.NewConfig()
	if peer.newest {
		config.Version = sarama.MaxVersion
	}
	config.Producer.Return.Successes = true
	config.Consumer.IsolationLevel = sarama.ReadCommitted
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	return config
}

func (peer ibm) write(topic, codec string, count int) {
	config := peer.config()
	codecs := map[string]sarama.CompressionCodec{
		"none": sarama.CompressionNone, "gzip": sarama.CompressionGZIP, "snappy": sarama.CompressionSnappy,
		"lz4": sarama.CompressionLZ4, "zstd": sarama.CompressionZSTD,
	}
	config.Producer.Compression = codecs[codec]
	config.Producer.Partitioner = sarama.NewManualPartitioner
	config.Producer.Idempotent = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Net.MaxOpenRequests = 1
	producer, err := sarama.NewSyncProducer([]string{peer.address}, config)
	must(err)
	defer producer.Close()
	messages := []*sarama.ProducerMessage{}
	for number := range count {
		message := &sarama.ProducerMessage{Topic: topic, Key: sarama.ByteEncoder(key(number)), Timestamp: time.UnixMilli(timeMs + int64(number))}
		if found := value(number); found != nil {
			message.Value = sarama.ByteEncoder(found)
		}
		for _, one := range headers(number) {
			message.Headers = append(message.Headers, sarama.RecordHeader{Key: []byte(one.name), Value: one.value})
		}
		messages = append(messages, message)
	}
	must(producer.SendMessages(messages))
}

func (peer ibm) transact(topic string, count int) {
	config := peer.config()
	config.Producer.Partitioner = sarama.NewManualPartitioner
	config.Producer.Idempotent = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Transaction.ID = "sarama-" + topic
	config.Net.MaxOpenRequests = 1
	producer, err := sarama.NewSyncProducer([]string{peer.address}, config)
	must(err)
	defer producer.Close()
	for number := range count {
		must(producer.BeginTxn())
		for partition := range int32(3) {
			_, _, err := producer.SendMessage(&sarama.ProducerMessage{Topic: topic, Partition: partition, Value: sarama.StringEncoder(strconv.Itoa(number))})
			must(err)
		}
		moved := []*sarama.PartitionOffsetMetadata{{Partition: 0, Offset: int64(number)}}
		must(producer.AddOffsetsToTxn(map[string][]*sarama.PartitionOffsetMetadata{topic: moved}, topic))
		if number%3 == 2 {
			must(producer.AbortTxn())
		} else {
			must(producer.CommitTxn())
		}
	}
}

// Takes what a member is given; done is called when nothing is left to read.
type claims struct {
	left     *int
	done     context.CancelFunc
	commits  bool
	assigned bool
}

func (taken claims) Setup(session sarama.ConsumerGroupSession) error {
	if taken.assigned {
		held := []int32{}
		for _, partitions := range session.Claims() {
			held = append(held, partitions...)
		}
		slices.Sort(held)
		say("assigned", held)
	}
	return nil
}

func (claims) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (taken claims) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for {
		select {
		case message, ok := <-claim.Messages():
			if !ok {
				return nil
			}
			found := []header{}
			for _, one := range message.Headers {
				found = append(found, header{string(one.Key), one.Value})
			}
			sayRecord(message.Topic, message.Partition, message.Offset, message.Key, message.Value, found, message.Timestamp.UnixMilli())
			session.MarkMessage(message, "")
			if taken.commits {
				session.Commit()
			}
			printing.Lock()
			*taken.left--
			ended := *taken.left == 0
			printing.Unlock()
			if ended {
				taken.done()
			}
		case <-session.Context().Done():
			return nil
		}
	}
}

func (peer ibm) consume(config *sarama.Config, topics []string, group string, ctx context.Context, taken claims) {
	consumer, err := sarama.NewConsumerGroup([]string{peer.address}, group, config)
	must(err)
	for ctx.Err() == nil {
		if err := consumer.Consume(ctx, topics, taken); err != nil {
			time.Sleep(200 * time.Millisecond)
		}
	}
	must(consumer.Close())
}

func (peer ibm) read(topics []string, group string, count int) {
	ctx, done := context.WithCancel(context.Background())
	peer.consume(peer.config(), topics, group, ctx, claims{left: &count, done: done})
}

func (peer ibm) member(topic, group, instance string, ended <-chan struct{}) {
	config, left := peer.config(), -1
	config.Consumer.Group.Session.Timeout = 10 * time.Second
	config.Consumer.Group.InstanceId = instance
	config.Consumer.Offsets.AutoCommit.Enable = false
	ctx, done := context.WithCancel(context.Background())
	go func() {
		<-ended
		done()
	}()
	peer.consume(config, []string{topic}, group, ctx, claims{left: &left, done: done, commits: true, assigned: true})
}

func (peer ibm) admin(topic string) {
	admin, err := sarama.NewClusterAdmin([]string{peer.address}, peer.config())
	must(err)
	defer admin.Close()
	size := func() int {
		found, err := admin.DescribeTopics([]string{topic})
		must(err)
		return len(found[0].Partitions)
	}
	listed := func() bool {
		found, err := admin.ListTopics()
		must(err)
		_, there := found[topic]
		return there
	}
	kept := retention
	must(admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: 3, ReplicationFactor: 1, ConfigEntries: map[string]*string{"retention.ms": &kept}}, false))
	configs, err := admin.DescribeConfig(sarama.ConfigResource{Type: sarama.TopicResource, Name: topic, ConfigNames: []string{"retention.ms"}})
	must(err)
	say("created", size(), configs[0].Value)
	must(admin.CreatePartitions(topic, 5, nil, false))
	say("grown", size())
	pause()
	say("listed", listed())
	must(admin.DeleteTopic(topic))
	say("deleted", !listed())
}
