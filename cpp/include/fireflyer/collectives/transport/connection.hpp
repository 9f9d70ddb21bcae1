// A connection to a neighbouring node, as it is handed over.
#pragma once

namespace ff {

struct Connection {
  int channel;  // see program.hpp; control_channel for the control connection of the pair
  int node;     // at the other end
  int socket;   // from 0: which one of this channel and node
  int fd;       // of a data connection: -1 where the fabric carries it
};

}  // namespace ff
