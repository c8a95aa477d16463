; Judge a history with the checker of Jepsen's Kafka workload, which uses Elle (spec: jepsen.tests.kafka of Jepsen 0.3.13).
; Each argument is a file with an operation a line, as tests/histories/outside.py writes them. Standard output has a line
; for each file: an example of each kind of anomaly, by its name.
(require '[clojure.data.json :as json]
         '[clojure.java.io :as io]
         '[jepsen.history :as h]
         '[jepsen.tests.kafka :as kafka])

(defn micro-op [[f & more]]
  (into [(keyword f)] more))

(defn operation [index line]
  (let [op (json/read-str line)
        f  (keyword (op "f"))]
    (h/op {:index   index
           :time    (op "time")
           :process (op "process")
           :type    (keyword (op "type"))
           :f       f
           :value   (if (= f :assign) (op "value") (mapv micro-op (op "value")))})))

(defn example [errors]
  (let [text (pr-str (if (map? errors) errors (first errors)))]
    (subs text 0 (min 600 (count text)))))

(doseq [path *command-line-args*]
  (with-open [lines (io/reader path)]
    (let [history (h/history (vec (map-indexed operation (line-seq lines))))
          errors  (:errors (kafka/analysis history {:ww-deps true}))]
      (println (json/write-str (update-vals (update-keys errors name) example))))))
(shutdown-agents)
