// The head of every message of the port (transport/mpi_port.h). Its seal follows, then the data.
#pragma once

#include "transport/mpi_port.h"

namespace farandole {

enum class MpiFrameKind : uint32_t { data, consumed, place, begun };

struct MpiFrame {
  uint64_t world = 0, stream = 0;
  int32_t lane = 0;
  MpiFrameKind kind{};
  uint64_t count = 0;  // of bytes: of data, consumed, or left of what is offered a place
  int32_t tag = 0;     // of the place
  uint32_t takes = 0;  // the place: so many of them

  // In a `begun` frame, of an all-reduce: `stream` is its communicator, `takes` how many have begun
  // there, `count` its elements, `lane` and `tag` its dtype and operation.
};

inline constexpr size_t kMpiHead = sizeof(MpiFrame) + Seals::kBytes;

/// An error of MPI's ends the use of MPI.
template <typename Body>
void MpiPort::guard(Body body) {
  try {
    body();
  } catch (const Error& error) {
    const std::string& evidence = error.where().evidence;
    lose(error.verdict() + (evidence.empty() ? "" : " (" + evidence + ")"));
  }
}

inline Error foreign_message(int peer) {
  return {ErrorCode::link,
          "rank " + std::to_string(peer) + " sent by MPI what is no message of this transport"};
}

}  // namespace farandole
