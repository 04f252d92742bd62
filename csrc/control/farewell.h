// Why a rank leaves its world, for the ranks that wait for it. It is stored in the rank's page, so
// that every group sees it, and is written before the rank shows that it leaves.
#pragma once

#include <memory>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "transport/segment.h"

namespace farandole {

class ControlMesh;

enum class FarewellState : uint64_t {
  none,    // it left by shutdown(), and all is well
  ending,  // its program ends; how, it says last of all
  known,
};

/// This rank leaves because of an exception, "ValueError: text", at `place`.
void show_exception(const Segment& segment, int rank, std::string_view what,
                    std::string_view place);
/// This process ends, and its exit code is not known yet: exit() will show it, to the launcher too,
/// which is told that process `blamed` caused it (0: this one). `mesh`: to ranks of other hosts.
void show_exit_code_at_end(std::shared_ptr<Segment> segment, std::shared_ptr<ControlMesh> mesh,
                           int rank, int blamed);

/// Whether a rank has shown why it leaves. Its program may go on for a while: in threads, say.
bool has_said_why(const Segment& segment, int rank);
/// Whether a rank leaves and will soon say why. False after a while, since its end may hang.
bool is_ending(const Segment& segment, int rank);
/// The error for those that wait for `rank`, if it did not leave in good order; `where` names it.
std::optional<Error> farewell_of(const Segment& segment, int rank, Context where);

}  // namespace farandole
