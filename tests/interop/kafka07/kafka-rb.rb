# Drives the unmodified client kafka-rb: verb host port topic count prefix
require 'kafka'

verb, host, port, topic, count, prefix = ARGV
count = count.to_i
place = { topic: topic, host: host, port: port.to_i, partition: 0 }
if verb == 'produce'
  values = (0...count).map { |number| format('%s-%05d', prefix, number) }
  plain = Kafka::Producer.new(place)
  packed = Kafka::Producer.new(place.merge(compression: Kafka::Message::GZIP_COMPRESSION))
  many = Kafka::MultiProducer.new(host: host, port: port.to_i)
  asked = Kafka::Consumer.new(place)
  third = count / 3
  size = 0
  values.each_slice(100).with_index do |slice, index|
    messages = slice.map { |value| Kafka::Message.new(value) }
    case index * 100 / third
    when 0 then plain.push(messages)
    when 1 then packed.push(messages)
    else many.multi_push([Kafka::ProducerRequest.new(topic, messages)])
    end
    size += slice.sum { |value| 9 + value.bytesize }
    sleep 0.001 while asked.fetch_latest_offset < size # three connections: their sets arrive in no order
  end
else
  consumer = Kafka::Consumer.new(place.merge(offset: 0, max_size: 50_000))
  seen = []
  seen.concat(consumer.consume.map(&:payload)) while seen.size < count
  puts seen
end
