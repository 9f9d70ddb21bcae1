// What both ends of a data connection do with its socket.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ff {

// Frames of messages as they go out, but for the payload.
std::vector<std::byte> message_frame(const std::string& body, std::size_t payload_bytes);
// Without delay, and with an end when the other machine is gone; not blocking.
void prepare_stream(int fd);

}  // namespace ff
