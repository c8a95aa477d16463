// Drives the unmodified npm client franz-kafka 0.7: verb host port topic count prefix
var Kafka = require('franz-kafka')
var [verb, host, port, topic, count, prefix] = process.argv.slice(2)
count = Number(count)
function name(number) { return prefix + '-' + String(number).padStart(5, '0') }
var kafka = new Kafka({
	brokers: [{ id: 0, host: host, port: Number(port) }],
	compression: 'gzip', queueTime: 50, batchSize: 200, maxFetchDelay: 100
})
kafka.connect(function () {
	var stream = kafka.topic(topic, { partitions: { consume: ['0-0'], produce: ['0:1'] } })
	stream.on('error', function (error) { console.error(error); process.exit(1) })
	if (verb === 'produce') {
		var number = 0
		var write = function () { // batches are packed side by side: only one at a time keeps the order
			for (var step = 0; step < 200; step++) stream.write(name(number++))
			setTimeout(number < count ? write : function () { process.exit(0) }, number < count ? 15 : 1500)
		}
		write()
	} else {
		var seen = []
		stream.on('data', function (data) {
			seen.push(data.toString())
			if (seen.length === count) process.stdout.write(seen.join('\n') + '\n', function () { process.exit(0) })
		})
		stream.resume()
	}
})
