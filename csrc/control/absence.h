// Ranks that have gone: the dead, and those that left, with the error for a rank that awaits them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "control/deaths.h"
#include "control/host.h"

namespace farandole {

/// A rank's view of which ranks are there, by world rank.
struct Presence {
  const Host* host = nullptr;
  const std::vector<bool>* dead = nullptr;
  const std::vector<Death>* deaths = nullptr;  // how
};

bool has_left(const Presence& around, int world_rank);
/// Whether the rank has died or left, so that it does nothing more.
bool is_absent(const Presence& around, int world_rank);
/// Why a rank elsewhere counts as lost though it is not known to be dead; `when`: "during X".
std::optional<Error> error_of_loss(const Host& host, int world_rank, const std::string& when,
                                   Context where);
/// Why, as the error of the operation and tensor in `where`; nothing while it is there.
/// `submitted`: it had submitted that operation.
std::optional<Error> absence_of(const Presence& around, int world_rank, Context where,
                                bool submitted = false);
/// The error of the operation in `where`, in a "group of ranks 0-3" that one of them has closed;
/// nothing where it leaves, for which it closes all.
std::optional<Error> closing_of(const Presence& around, int world_rank, const std::string& group,
                                Context where);

}  // namespace farandole
