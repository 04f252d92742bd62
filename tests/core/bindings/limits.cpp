// Sizes at which the engine does something else.
#include "backends/paths.h"
#include "core/bindings/bind.h"
#include "stream/stream_page.h"

namespace farandole {

void bind_limits(py::module_& testing) {
  testing.def(
      "limits",
      [] {
        py::dict bytes;
        for (const PathRow* row : path_table()) bytes[py::str(row->name)] = row->most_bytes;
        bytes["piece of one_shot"] = kOneShotPiece;
        bytes["block of cico"] = kCicoChunk;
        bytes["handed in"] = path_named("mapped")->least_bytes(Collective::gather);
        return bytes;
      },
      "Sizes in bytes at which something else is done: by path, then by what it is of.");
}

}  // namespace farandole
