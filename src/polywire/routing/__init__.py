"""Share topics among the processes of one broker. Any process serves a client, whichever process has the topic.

``RoutedBroker`` has the methods of a broker. Protocols call it for every topic, and it forwards calls for topics of
other processes (decision 0130).
"""
